"""The schema of an experiment: frozen dataclasses, and the checks that need no files. Standard library only."""

import dataclasses
from typing import Any, NoReturn

from pipejax.config.row_names import bare_name, read_columns
from pipejax.model.backbone import Backbone
from pipejax.model.t5_config import T5Config
from pipejax.system.errors import UserError
from pipejax.system.fields import check_settings, setting, shown_value

STRATEGIES = ("pipelined", "sequential")  # of decoding; beam search is sequential with decode.beams > 1
DRAFTS = ("none", "source", "jacobi", "model")
OBJECTIVES = ("pipelined", "sequential", "none")
STOPS = ("empty_row", "literal")
SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "adafactor")
REMATS = ("auto", "none", "dots", "layers")  # the fastest first
FREEZES = ("none", "encoder")
DTYPES = ("auto", "float32", "bfloat16")
WEIGHTS = ("auto", "float32", "bfloat16", "int8")
LIMITS = ("none", "source")  # on the tokens that may be written
ROWS = ("list", "delimiter", "sentences")
QUOTES = ("auto", "quote", "letters")
EMPTY_TARGETS = ("keep", "skip", "refuse")
SPECIAL_TOKENS = ("auto", "template", "eos")  # "template": as the tokenizer adds them; "eos": the model's eos alone
METRICS = ("exact", "exact_caseless", "spans", "keyphrases", "keyphrases_kp20k", "rouge", "rouge_score")
GRID = 2**15  # at the most: places on the grid are counted in 32 bits
PLACES = 2**24  # of a grid at the most: beyond that no device holds what decoding keeps of each


@dataclasses.dataclass(frozen=True)
class GridConfig:
    """The pipelined decoder's grid (paper section 3.4; times and rows are counts)."""

    delay: int = setting(1, least=0, most=GRID)  # Δt: a new row starts every `delay` time-steps; 0: all start at once
    time_max: int = setting(50, least=1, most=GRID)  # time-steps at the most
    sub_max: int = setting(20, least=1, most=GRID)  # rows at the most
    stop: str = setting("empty_row", choices=STOPS)  # "literal": Algorithm 1 as it is written
    row_names: tuple[str, ...] = setting(())  # the beginnings of every answer's rows, in turn; none: they are free


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where examples come from, and how long they may be (in tokens)."""

    task: str = setting("jsonl")  # "jsonl" and "csv" are files of your own
    train: str = setting("")  # `jsonl`, `csv`: a path, a URL, a pattern of either, or hub:OWNER/NAME[SPLIT]; "": none
    dev: str = setting("")  # for evaluations in training
    test: str = setting("")  # for `pipejax evaluate`
    stream: int = setting(0, least=0)  # `jsonl`, `csv`: `train` is read as needed, and so many are shuffled together
    split: str = setting("")  # `jsonl`, `csv`: shares of train, dev and test in `train`, such as "0.8,0.1,0.1"
    split_seed: int = setting(0, least=0)  # another one parts it otherwise
    csv_delimiter: str = setting("")  # between columns; "": a tab in .tsv, else found by the line of names
    csv_quotes: str = setting("auto", choices=QUOTES)  # "quote": they may enclose a cell; "auto": text in .tsv alone
    skip_bad: bool = setting(False)  # `jsonl`, `csv`: lines that are no examples are left out and counted
    empty_targets: str = setting("keep", choices=EMPTY_TARGETS)  # training examples without an answer
    source_template: str = setting("")  # `jsonl`, `csv`: "Title: {title} Context: {text}"; "" = the field "source"
    targets: str | tuple[str, ...] = setting("targets")  # `jsonl`, `csv`: the field of the rows; or columns, each a row
    rows: str = setting("list", choices=ROWS)  # `jsonl`, `csv`: what it is: a list, or text to part into rows
    delimiter: str = setting("\n")  # `jsonl`, `csv`: between the rows, if `rows` is "delimiter"
    metric: str = setting("", choices=("", *METRICS))  # "" = the task's own; for `jsonl` and `csv` that is "exact"
    data_dir: str = setting("")  # where `pipejax data prepare` wrote; "" = TFDS's own directory
    tokenizer: str = setting("")  # directory or hub id; "" = the task's own or that of `train.init_from`
    new_tokenizer: bool = setting(False)  # whether its ids may mean other pieces than those of `train.init_from`
    special_tokens: str = setting("auto", choices=SPECIAL_TOKENS)  # added to sources; "auto": as the weights learned
    max_source: int = setting(2048, least=2, most=2**20)  # longer sources are truncated; special tokens are kept
    max_target: int = setting(512, least=2, most=2**20)  # a longer target loses its last rows (training only)
    separator: str = setting(" ; ")  # between the rows of a sequential target and of the decoded text

    def __post_init__(self) -> None:
        """Normalises `split` to a text of shares, and `targets` to a name or a tuple of names."""
        split = self.split.tolist() if hasattr(self.split, "tolist") else self.split
        if isinstance(split, list | tuple):
            split = ",".join(map(str, split))
        elif isinstance(split, str) and split.startswith("[") and split.endswith("]"):
            split = ",".join(map(str.strip, split[1:-1].split(",")))
        targets = self.targets.tolist() if hasattr(self.targets, "tolist") else self.targets
        if isinstance(targets, str | list | tuple):
            targets = read_columns(targets)
        object.__setattr__(self, "split", split)
        object.__setattr__(self, "targets", targets)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are rows; empty if one field holds all rows."""
        return self.targets if isinstance(self.targets, tuple) else ()


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimisation. Steps are optimizer updates; a batch is counted in examples."""

    objective: str = setting("pipelined", choices=OBJECTIVES, untold=("none",))  # "none": weights never trained here
    steps: int = setting(1000, least=1)  # updates
    batch_size: int = setting(24, least=1, most=2**20)  # examples of an update
    accumulate: int = setting(1, least=1)  # parts that a batch is computed in, one after the other
    pack: int = setting(0, least=0)  # examples whose targets share a row of slots; 0: up to four, by the batch size
    length_group: int = setting(16, least=1, most=2**16)  # batches drawn together and sorted by length; 1: each alone
    remat: str = setting("auto", choices=REMATS)  # what the backward pass repeats; "auto": by the memory of a GPU
    shapes: int = setting(22, least=1)  # padded shapes of batches, at the most but for rare lengths; each compiles once
    optimizer: str = setting("adamw", choices=OPTIMIZERS)  # "adafactor" needs less memory
    freeze: str = setting("none", choices=FREEZES)  # "encoder": it and the embedding table keep their values
    lora_rank: int = setting(0, least=0, most=2**16)  # of the factors that are trained instead of the weights; 0: none
    learning_rate: float = setting(1e-4, above=0.0)  # after the warm-up
    schedule: str = setting("constant", choices=SCHEDULES)  # after the warm-up; the others fall to 0 at `steps`
    warmup_steps: int = setting(100, least=0)  # in which the rate rises from 0
    warmup_share: float = setting(0.0, least=0.0, below=1.0)  # of `steps`, instead of `warmup_steps`; 0: these count
    weight_decay: float = setting(0.0, least=0.0)  # decoupled: times the rate, at every update
    beta1: float = setting(0.9, least=0.0, below=1.0)  # of AdamW: decay of the mean gradient
    beta2: float = setting(0.999, least=0.0, below=1.0)  # of AdamW: decay of the mean square
    epsilon: float = setting(1e-8, above=0.0)  # of AdamW: added to the root of the mean square
    clip_norm: float = setting(1.0, above=0.0)  # gradients are scaled down to this global norm
    dropout: float = setting(0.1, least=0.0, below=1.0)  # in training alone; rounded to a multiple of 2**-16
    new_dropout: bool = setting(False)  # continue a run that an older release began, with the masks of this one
    dtype: str = setting("auto", choices=DTYPES)  # of the computation; "auto": bfloat16 on GPU and TPU, else float32
    seed: int = setting(0, least=0, most=2**31 - 1)  # of initial weights, order of the data and dropout
    max_bad_steps: int = setting(10, least=1)  # in a row whose loss or gradient is not finite; then training ends
    init_from: str = setting("")  # a converted or trained checkpoint to start from; "" = random weights
    init_best: bool = setting(False)  # the best evaluated step of `init_from` instead of the newest
    eos_token_id: int = setting(-1, least=-1)  # the end token that rows are trained with; -1: the first of the model's
    log_every: int = setting(50, least=1)  # updates between two lines of the log
    evaluate_every: int = setting(500, least=1)  # updates between two evaluations
    evaluate_examples: int = setting(256, least=0)  # of the dev split; 0 = all of it
    patience: int = setting(0, least=0)  # evaluations in a row without a better one; then training ends; 0: never
    checkpoint_every: int = setting(500, least=1)  # updates between two checkpoints: the most that a kill costs
    keep_checkpoints: int = setting(3, least=1)  # the newest that stay on disk
    keep_every: int = setting(0, least=0)  # checkpoints of every multiple of this step stay as well; 0: none
    tensorboard: bool = setting(False)  # WORKDIR/tensorboard, too; needs tensorboardX
    wandb: str = setting("")  # a project of Weights & Biases, too; needs wandb
    mlflow: str = setting("")  # an experiment of MLflow, too, on the server that MLflow's own variables name; needs it


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Decoding settings that are not the grid's."""

    max_length: int = setting(512, least=1, most=2**20)  # tokens of the sequential decoder, eos included
    beams: int = setting(1, least=1)  # of the sequential decoder: 1 is greedy, more is beam search
    length_penalty: float = setting(1.0, least=-5.0, most=5.0)  # beams compare log-probability / length**this
    temperature: float = setting(0.0, least=0.0, most=100.0)  # 0: the most likely token; else tokens are drawn
    top_k: int = setting(0, least=0)  # of so many most likely tokens; 0: of all
    top_p: float = setting(1.0, above=0.0, most=1.0)  # of the fewest that have this probability together
    seed: int = setting(0, least=0, most=2**31 - 1)  # of what is drawn
    samples: int = setting(1, least=1, most=2**16)  # answers of each source; more than 1 need a temperature
    unique_rows: bool = setting(False)  # a row that repeats one above is left out; two such in turn end the answer
    scores: bool = setting(False)  # records hold the log-probability of each token
    limit: str = setting("none", choices=LIMITS)  # "source": only tokens of the source are written
    draft: str = setting("none", choices=DRAFTS)  # the guesser of tokens, for fewer decoder calls: docs/drafting.md
    draft_checkpoint: str = setting("")  # `draft` = "model": a small T5 of the same vocabulary
    draft_tokens: int = setting(8, least=1, most=64)  # guessed for a row in a call, at the most
    trace: bool = setting(False)  # records hold what was drafted in each call, and what was accepted
    batch_size: int = setting(8, least=1, most=2**16)  # sources decoded together on a device
    dtype: str = setting("auto", choices=DTYPES)  # of the computation, as train.dtype
    weights: str = setting("auto", choices=WEIGHTS)  # the type weights are held in; "auto": in the dtype, as trained


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; data = -1 takes all that the other two leave."""

    data: int = setting(-1, least=-1)  # devices that split batches; -1: all that the other two leave
    fsdp: int = setting(1, least=1)  # devices that split batches and parameters
    tensor: int = setting(1, least=1)  # devices that split heads and vocabulary


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment. `model` is None when the weights come from `train.init_from`."""

    name: str = setting("experiment")  # of the experiment, for people
    model: T5Config | Backbone | None = setting(None)  # the architecture, for random weights
    method: Any = setting(None)  # a way to write answers of your own: docs/methods.md; none: as train.objective says
    grid: GridConfig = dataclasses.field(default_factory=GridConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)


def check(config: Config, *, where: str) -> None:
    """Checks types, ranges and the rules between keys; raises a UserError that names the key."""
    check_settings(config, "", where)

    def refuse(key: str, found: object, expected: str) -> NoReturn:
        raise UserError(f"{where}: {key}: found {found}; expected {expected}")

    model, method, grid, data = config.model, config.method, config.grid, config.data
    if not (method is None or isinstance(method, dict) or dataclasses.is_dataclass(method)) or isinstance(method, type):
        refuse("method", shown_value(method), "an object, such as LastFirst(delay=2)")
    if model is not None:
        for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
            if getattr(model, key) >= model.vocab_size:
                refuse(f"model.{key}", getattr(model, key), f"an id below model.vocab_size = {model.vocab_size}")
        for i, end in enumerate(model.other_eos_token_ids):
            if not 0 <= end < model.vocab_size:
                refuse("model.other_eos_token_ids", end, f"ids from 0 on, below model.vocab_size = {model.vocab_size}")
            if end in model.end_token_ids[: i + 1]:
                refuse("model.other_eos_token_ids", f"{end} twice", "each id once, and not that of model.eos_token_id")
        model.check(where)
        candidates = 1 + len(model.end_token_ids)  # of each beam
        if candidates * config.decode.beams > model.vocab_size:
            part = "half" if candidates == 2 else f"1/{candidates}"
            refuse("decode.beams", config.decode.beams, f"at most {part} of model.vocab_size = {model.vocab_size}")
    if (places := grid.time_max * grid.sub_max) > PLACES:
        found = f"{places} places, time_max {grid.time_max} x sub_max {grid.sub_max}"
        refuse("grid", found, f"at most {PLACES}")
    if any(not name.strip() for name in grid.row_names):
        refuse("grid.row_names", "an empty one", "text in each")
    if (names := len(grid.row_names)) > grid.sub_max:
        refuse("grid.row_names", names, f"at most grid.sub_max = {grid.sub_max}")
    if columns := data.columns:
        if not all(column.strip() for column in columns):
            refuse("data.targets", f"an empty name in {list(columns)}", "text in each")
        if "id" in columns or len({*columns}) < len(columns):
            refuse("data.targets", list(columns), "each column once, and no id, by which records are known")
        if data.rows != "list":
            refuse("data.rows", f"{data.rows} with several columns as data.targets", "list, as each column is a row")
        if names and names != len(columns):
            refuse("grid.row_names", f"{names} with {len(columns)} columns as data.targets", "one for each, or none")
        bare = [bare_name(name) for name in grid.row_names]
        if names and bare != [*columns] and {*bare} == {*columns}:
            refuse("grid.row_names", f"another order than data.targets = {list(columns)}", "the same, or no names")
    if grid.delay == 0 and len({*grid.row_names}) < names:
        refuse("grid.row_names", "a name twice", "others, since grid.delay = 0")
    if config.decode.weights == "float32" and config.decode.dtype == "bfloat16":
        refuse("decode.weights", "float32 with decode.dtype = bfloat16", "auto, bfloat16 or int8")
    if config.decode.draft == "model" and not config.decode.draft_checkpoint:
        refuse("decode.draft_checkpoint", "nothing with decode.draft = model", "the checkpoint of a small T5")
    if config.train.init_best and not config.train.init_from:
        refuse("train.init_best", "true without train.init_from", "a run to start from")
    if config.mesh.data == 0:
        refuse("mesh.data", 0, "-1 or at least 1")
    if data.rows == "delimiter" and not data.delimiter:
        refuse("data.delimiter", "nothing", "at least one character")
    if len(data.csv_delimiter) > 1 or data.csv_delimiter in ('"', "\n", "\r", " "):
        refuse("data.csv_delimiter", repr(data.csv_delimiter), "one character, such as ; or a tab, or none")
    if config.train.objective == "sequential" and not data.separator:
        refuse("data.separator", "nothing", "at least one character")
