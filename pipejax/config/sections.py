"""The schema of an experiment: frozen dataclasses, and the checks that need no files.

The module itself needs only the standard library.
"""

import dataclasses
from typing import Any, NoReturn, cast

from pipejax import moved
from pipejax.config.row_names import bare_name, read_columns
from pipejax.model.backbone import Backbone
from pipejax.model.t5_config import T5Config
from pipejax.registry import DRAFTERS
from pipejax.system.errors import UserError
from pipejax.system.fields import Command, Facts, check_settings, facts_of, section, setting, shown_value

METHODS = ("pipelined", "sequential")  # the methods of pipejax; beam search is sequential with decode.beams > 1
DRAFTS = ("none", *DRAFTERS)
TRAINED_METHODS = (*METHODS, "none")
STOPS = ("empty_row", "literal")
SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "adafactor")
REMATS = ("auto", "none", "dots", "layers")  # fastest first
FREEZES = ("none", "encoder", "backbone")
DTYPES = ("auto", "float32", "bfloat16")
WEIGHTS = ("auto", "float32", "bfloat16", "int8")
LIMITS = ("none", "source")  # restrictions on the tokens of an answer
SCOPES = ("answer", "row")  # the tokens among which a token is a repetition
ROWS = ("list", "delimiter", "sentences")
QUOTES = ("auto", "quote", "letters")
EMPTY_TARGETS = ("keep", "skip", "refuse")
SPECIAL_TOKENS = ("auto", "template", "eos")  # "template": the tokenizer's special tokens; "eos": the model's eos only
METRICS = ("exact", "exact_caseless", "spans", "keyphrases", "keyphrases_kp20k", "rouge", "rouge_score")
GRID = 2**15  # the largest time and row: coordinates on the grid are 32 bits
ANSWERING: tuple[Command, ...] = ("decode", "export", "teach")  # commands for which a checkpoint writes answers
READING: tuple[Command, ...] = ("decode", "probe", "teach")  # commands that read sources or examples
LEARNING: tuple[Command, ...] = ("probe", "teach")  # commands that train weights
EXAMPLES = ("data", "dev")  # the fingerprints of the examples of a run
# The most positions of a grid; decoding stores several values for each, which would exceed a device's memory.
PLACES = 2**24


@dataclasses.dataclass(frozen=True)
class GridConfig:
    """The pipelined decoder's grid (paper section 3.4; times and rows are counts)."""

    delay: int = setting(  # Δt: a new row starts every `delay` time-steps; 0: all rows start at once.
        1, least=0, most=GRID
    )
    time_max: int = setting(50, least=1, most=GRID)  # the most time-steps
    sub_max: int = setting(20, least=1, most=GRID)  # the most rows
    stop: str = setting("empty_row", choices=STOPS)  # "literal": the stopping rule of Algorithm 1 as published
    row_names: tuple[str, ...] = setting(())  # the beginning of each row of an answer, in order; empty: rows are free


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The source of the examples, and their maximum lengths in tokens."""

    task: str = setting("jsonl")  # "jsonl" and "csv" read the files below
    train: str = setting(  # `jsonl`, `csv`: a path, a URL, a pattern of either, or hub:OWNER/NAME[SPLIT]; "": none
        "", resume=("data",)
    )
    dev: str = setting("", resume=("dev",))  # examples for evaluations in training; as `train`
    test: str = setting("", resume=True)  # examples for `pipejax evaluate`; as `train`
    stream: int = setting(  # `jsonl`, `csv`: examples per shuffled buffer of a stream; 0: `train` is read into memory.
        0, least=0
    )
    split: str = setting(  # `jsonl`, `csv`: shares of train, dev and test in `train`, such as "0.8,0.1,0.1"
        "", resume=EXAMPLES
    )
    split_seed: int = setting(0, least=0, resume=EXAMPLES)  # another seed gives another split
    csv_delimiter: str = setting(  # between columns; "": a tab in .tsv, else detected from the line of names
        "", keeps_spaces=True, commands=READING, resume=EXAMPLES
    )
    csv_quotes: str = setting(  # "quote": quotes may enclose a cell;
        # "letters": quotes are text; "auto": "letters" in .tsv, else "quote".
        "auto",
        choices=QUOTES,
        commands=READING,
        resume=EXAMPLES,
    )
    skip_bad: bool = setting(False, resume=EXAMPLES)  # `jsonl`, `csv`: skip and count lines that are not valid examples
    empty_targets: str = setting(  # Training examples without an answer: "keep" or leave out.
        "keep", choices=EMPTY_TARGETS
    )
    source_template: str = setting(  # `jsonl`, `csv`: "Title: {title} Context: {text}"; "" = the field "source"
        "", keeps_spaces=True
    )
    targets: str | tuple[str, ...] = setting(  # `jsonl`, `csv`: the field with the rows; or column names, each a row.
        "targets"
    )
    rows: str = setting("list", choices=ROWS)  # `jsonl`, `csv`: the form of that field: a list, or text to split
    delimiter: str = setting("\n", keeps_spaces=True)  # `jsonl`, `csv`: the text between rows, if `rows` is "delimiter"
    metric: str = setting(  # "": the task's default, which is "exact" for `jsonl` and `csv`
        "", choices=("", *METRICS), commands=LEARNING
    )
    data_dir: str = setting("", resume=EXAMPLES)  # the --data-dir of `pipejax data prepare`; "": the directory of TFDS
    tokenizer: str = setting(  # directory or hub id; "": the tokenizer of the task or of `train.init_from`
        "", resume=("tokenizer",)
    )
    new_tokenizer: bool = setting(False)  # allow ids to mean other pieces than in `train.init_from`
    special_tokens: str = setting(  # Added to sources; "auto": as the weights were trained.
        "auto", choices=SPECIAL_TOKENS
    )
    max_source: int = setting(  # longer sources are truncated; special tokens are kept
        2048, least=2, most=2**20, commands=READING, records="tokens"
    )
    max_target: int = setting(  # longer targets lose their last rows (training only)
        512, least=2, most=2**20, commands=LEARNING
    )
    separator: str = setting(  # between the rows of a sequential target and of decoded text
        " ; ", keeps_spaces=True, commands=READING, records="text"
    )

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
        """The columns that are rows; empty if one field has all rows."""
        return self.targets if isinstance(self.targets, tuple) else ()


@moved.fields(objective="method")
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimisation. Steps are optimizer updates; a batch is counted in examples."""

    method: str = setting(  # The method that is trained; "none": weights that were not trained here.
        "pipelined", choices=TRAINED_METHODS, untold=("none",), commands=()
    )
    steps: int = setting(1000, least=1, resume=True, per_update=True)  # updates
    batch_size: int = setting(24, least=1, most=2**20)  # examples per update
    accumulate: int = setting(1, least=1)  # parts of a batch, computed one after the other
    pack: int = setting(  # Examples whose targets share a padded sequence; 0: up to four, depending on the batch size.
        0, least=0
    )
    length_group: int = setting(16, least=1, most=2**16)  # batches drawn together and sorted by length; 1: no sorting
    remat: str = setting(  # Recomputed in the backward pass; "auto": chosen by the memory of a GPU.
        "auto", choices=REMATS
    )
    shapes: int = setting(  # The most padded shapes of batches, except for rare lengths; each is compiled once.
        22, least=1, resume=True
    )
    optimizer: str = setting("adamw", choices=OPTIMIZERS)  # "adafactor" needs less memory
    freeze: str = setting(  # "encoder": the encoder and the embedding table are not trained; "backbone": only the
        # parameters of `auxiliary` are trained
        "none",
        choices=FREEZES,
    )
    lora_rank: int = setting(  # Rank of low-rank factors trained in place of the weights; 0: train the weights.
        0, least=0, most=2**16
    )
    learning_rate: float = setting(1e-4, above=0.0, commands=LEARNING)  # after the warm-up
    schedule: str = setting(  # After the warm-up; "linear" and "cosine" decay to 0 at `steps`.
        "constant", choices=SCHEDULES
    )
    warmup_steps: int = setting(100, least=0, per_update=True)  # updates in which the rate rises from 0
    warmup_share: float = setting(  # As a share of `steps`, in place of `warmup_steps`; 0: use `warmup_steps`.
        0.0, least=0.0, below=1.0
    )
    weight_decay: float = setting(0.0, least=0.0)  # decoupled: multiplied by the rate at each update
    beta1: float = setting(0.9, least=0.0, below=1.0)  # AdamW's decay of the mean gradient
    beta2: float = setting(0.999, least=0.0, below=1.0)  # AdamW's decay of the mean square
    epsilon: float = setting(1e-8, above=0.0)  # AdamW's term added to the root of the mean square
    clip_norm: float = setting(1.0, above=0.0)  # gradients are scaled down to this global norm
    dropout: float = setting(0.1, least=0.0, below=1.0)  # in training only; rounded to a multiple of 2**-16
    new_dropout: bool = setting(  # continue a run of an older release with the dropout masks of this one
        False, resume=True
    )
    dtype: str = setting(  # compute dtype; "auto": bfloat16 on GPU and TPU, else float32
        "auto", choices=DTYPES, commands=LEARNING
    )
    seed: int = setting(0, least=0, most=2**31 - 1)  # for initial weights, data order and dropout
    max_bad_steps: int = setting(  # Steps in a row with a loss or gradient that is not finite,
        # after which training ends.
        10,
        least=1,
    )
    init_from: str = setting(  # a converted or trained checkpoint to start from; "" = random weights
        "", commands=(), resume=("init",)
    )
    init_best: bool = setting(  # the best evaluated step of `init_from` instead of the newest
        False, commands=(), resume=("init",)
    )
    eos_token_id: int = setting(-1, least=-1)  # the end token in training targets; -1: the model's first
    log_every: int = setting(50, least=1, resume=True, per_update=True)  # updates between two lines of the log
    evaluate_every: int = setting(500, least=1, resume=True, per_update=True)  # updates between two evaluations
    evaluate_examples: int = setting(256, least=0, resume=True)  # examples of the dev split; 0: all
    patience: int = setting(  # evaluations in a row without improvement, after which training ends; 0: never
        0, least=0, resume=True
    )
    checkpoint_every: int = setting(  # updates between two checkpoints: the most that a kill can lose
        500, least=1, resume=True, per_update=True
    )
    keep_checkpoints: int = setting(3, least=1, resume=True)  # the number of newest checkpoints that stay on disk
    keep_every: int = setting(0, least=0, resume=True)  # multiples of this step also stay on disk; 0: none
    tensorboard: bool = setting(False, resume=True)  # also log to WORKDIR/tensorboard; needs tensorboardX
    wandb: str = setting("", resume=True)  # also log to this project of Weights & Biases; needs wandb
    mlflow: str = setting(  # also log to this experiment on the MLflow server of MLFLOW_TRACKING_URI; needs mlflow
        "", resume=True
    )


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Decoding settings other than the grid's."""

    max_length: int = setting(  # the most tokens of the sequential decoder, including eos
        512, least=1, most=2**20, read_by="sequential", exported=True
    )
    beams: int = setting(1, least=1, exported=True)  # beams of the sequential decoder; 1: greedy
    length_penalty: float = setting(  # beams compare log-probability / length**length_penalty
        1.0, least=-5.0, most=5.0, exported=True
    )
    temperature: float = setting(  # 0: the most likely token; else tokens are sampled
        0.0, least=0.0, most=100.0, ability="sample", asks=True, request=True
    )
    top_k: int = setting(  # sample from this many most likely tokens; 0: from all
        0, least=0, ability="sample", request=True
    )
    top_p: float = setting(  # sample from the fewest tokens whose probabilities add up to this
        1.0, above=0.0, most=1.0, ability="sample", request=True
    )
    min_p: float = setting(  # sample from the tokens of at least this share of the highest probability; 0: from all
        0.0, least=0.0, most=1.0, ability="sample", request=True
    )
    seed: int = setting(0, least=0, most=2**31 - 1, ability="sample", request=(-(2**63), 2**63 - 1))  # for sampling
    repetition_penalty: float = setting(  # divides the logits of tokens that the answer has; 1: none
        1.0, above=0.0, most=100.0, ability="rules", asks=True, request=True
    )
    no_repeat_ngram_size: int = setting(  # the length of token sequences that an answer has only once; 0: none
        0, least=0, most=2**10, ability="rules", asks=True, request=True
    )
    repetition_scope: str = setting(  # "row": the tokens of other rows are not repetitions
        "answer", choices=SCOPES, ability="rules"
    )
    rules: str | tuple[str, ...] = setting(  # changes of logits, as MODULE:CLASS,MODULE:CLASS: docs/methods.md
        "", ability="rules", asks=True
    )
    samples: int = setting(1, least=1, most=2**16)  # answers per source; more than 1 need a temperature
    unique_rows: bool = setting(False)  # drop a row that repeats an earlier one; two in succession end the answer
    scores: bool = setting(False, ability="score", asks=True)  # records contain the log-probability of each token
    limit: str = setting(  # "source": answers contain only tokens of the source
        "none", choices=LIMITS, ability="limit", asks=True
    )
    draft: str = setting(  # the drafter, whose tokens save decoder calls, or MODULE:CLASS: docs/drafting.md
        "none",
        choices=DRAFTS,
        classes=True,
        ability="draft",
        asks=True,
        resume=True,
        records="trace",
        exported=True,
    )
    draft_checkpoint: str = setting(  # the drafter's parameters; `draft` = "model": a small T5 of the same vocabulary
        "", with_weights=True, resume=True, records="trace"
    )
    draft_tokens: int = setting(  # the most draft tokens of a row per call
        8, least=1, most=64, ability="draft", resume=True, records="trace", exported=True
    )
    trace: bool = setting(False)  # records contain the drafted and the accepted tokens of each call
    batch_size: int = setting(  # sources decoded together on one device
        8, least=1, most=2**16, records="none", exported=True
    )
    dtype: str = setting(  # compute dtype, as in train.dtype
        "auto", choices=DTYPES, commands=(*ANSWERING, "probe"), with_weights=True, exported=True
    )
    weights: str = setting(  # dtype of stored weights; "auto": as decode.dtype
        "auto", choices=WEIGHTS, with_weights=True, exported=True
    )

    @property
    def rule_names(self) -> tuple[str, ...]:
        """The names in `rules`."""
        listed = self.rules.split(",") if isinstance(self.rules, str) else self.rules
        return tuple(filter(None, map(str.strip, listed)))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; data = -1 uses all devices that the other two axes leave."""

    data: int = setting(-1, least=-1)  # devices that split batches; -1: all remaining devices
    fsdp: int = setting(1, least=1)  # devices that split batches and parameters
    tensor: int = setting(1, least=1)  # devices that split heads and vocabulary


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment. `model` is None when the weights come from `train.init_from`."""

    name: str = setting("experiment", commands=("teach",), resume=True)  # a label for people
    model: T5Config | Backbone | None = setting(None)  # the architecture, for random weights
    method: Any = setting(  # a custom way to write answers: docs/methods.md; None: the method named by train.method
        None, commands=("decode", "export", "probe")
    )
    auxiliary: Any = setting(  # parameters beside the model, trained alone: docs/auxiliary.md; None: none
        None, commands=()
    )
    grid: GridConfig = section(GridConfig, commands=ANSWERING, read_by="pipelined", records="tokens")
    data: DataConfig = section(DataConfig, commands=("probe",))
    train: TrainConfig = section(TrainConfig, commands=("teach",))
    decode: DecodeConfig = section(DecodeConfig, commands=ANSWERING, records="tokens")
    mesh: MeshConfig = section(MeshConfig, commands=("teach",), resume=True)


SETTINGS: dict[str, Facts] = facts_of(Config)  # the facts of every setting, by dotted key
# The facts of each field of `Config`: the sections, and the settings without a section.
SECTIONS: dict[str, Facts] = {field.name: cast(Facts, field.metadata) for field in dataclasses.fields(Config)}


def check(config: Config, *, where: str) -> None:
    """Checks types, ranges and the rules between settings.

    Raises:
      UserError: a value is invalid; the message names the setting.
    """
    check_settings(config, "", where)

    def refuse(key: str, found: object, expected: str) -> NoReturn:
        raise UserError(f"{where}: {key}", found=f"{found}", expected=expected)

    model, method, grid, data = config.model, config.method, config.grid, config.data
    if not (method is None or isinstance(method, dict) or dataclasses.is_dataclass(method)) or isinstance(method, type):
        refuse("method", shown_value(method), "an object, such as LastFirst(delay=2)")
    auxiliary = config.auxiliary
    if auxiliary is not None and not (isinstance(auxiliary, dict) or hasattr(auxiliary, "init_params")):
        refuse("auxiliary", shown_value(auxiliary), "an object of a subclass of Auxiliary")
    if (config.train.freeze == "backbone") != (auxiliary is not None):
        with_or_without = "with" if auxiliary is not None else "without"
        expected = "train.freeze = backbone and auxiliary=MODULE:CLASS, or neither of them"
        refuse("train.freeze", f"{config.train.freeze} {with_or_without} auxiliary parameters", expected)
    if auxiliary is not None and config.train.lora_rank:
        refuse("train.lora_rank", config.train.lora_rank, "0 with auxiliary parameters, which are trained alone")
    if model is not None:
        for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
            if getattr(model, key) >= model.vocab_size:
                refuse(f"model.{key}", getattr(model, key), f"an id below model.vocab_size = {model.vocab_size}")
        for i, end in enumerate(model.other_eos_token_ids):
            if not 0 <= end < model.vocab_size:
                refuse("model.other_eos_token_ids", end, f"ids from 0 to below model.vocab_size = {model.vocab_size}")
            if end in model.end_token_ids[: i + 1]:
                refuse("model.other_eos_token_ids", f"{end} twice", "different ids, other than model.eos_token_id")
        model.check(where)
        candidates = 1 + len(model.end_token_ids)  # per beam
        if candidates * config.decode.beams > model.vocab_size:
            part = "half" if candidates == 2 else f"1/{candidates}"
            refuse("decode.beams", config.decode.beams, f"at most {part} of model.vocab_size = {model.vocab_size}")
    if (places := grid.time_max * grid.sub_max) > PLACES:
        found = f"{places} places, time_max {grid.time_max} x sub_max {grid.sub_max}"
        refuse("grid", found, f"at most {PLACES}")
    if any(not name.strip() for name in grid.row_names):
        refuse("grid.row_names", "an empty name", "a text for each")
    if (names := len(grid.row_names)) > grid.sub_max:
        refuse("grid.row_names", names, f"at most grid.sub_max = {grid.sub_max}")
    if columns := data.columns:
        if not all(column.strip() for column in columns):
            refuse("data.targets", f"an empty name in {list(columns)}", "a text for each")
        if "id" in columns or len({*columns}) < len(columns):
            refuse("data.targets", list(columns), "different columns, and not the column id")
        if data.rows != "list":
            refuse("data.rows", f"{data.rows} with several columns as data.targets", "list, since each column is a row")
        if names and names != len(columns):
            refuse(
                "grid.row_names", f"{names} with {len(columns)} columns as data.targets", "one name per column, or none"
            )
        bare = [bare_name(name) for name in grid.row_names]
        if names and bare != [*columns] and {*bare} == {*columns}:
            refuse(
                "grid.row_names", f"another order than data.targets = {list(columns)}", "the same order, or no names"
            )
    if grid.delay == 0 and len({*grid.row_names}) < names:
        refuse("grid.row_names", "a name twice", "different names, since grid.delay = 0")
    if config.decode.weights == "float32" and config.decode.dtype == "bfloat16":
        refuse("decode.weights", "float32 with decode.dtype = bfloat16", "auto, bfloat16 or int8")
    if config.decode.draft == "model" and not config.decode.draft_checkpoint:
        refuse("decode.draft_checkpoint", "nothing with decode.draft = model", "the checkpoint of a small T5")
    if config.train.init_best and not config.train.init_from:
        refuse("train.init_best", "true without train.init_from", "train.init_from with a run")
    if config.mesh.data == 0:
        refuse("mesh.data", 0, "-1 or at least 1")
    if data.rows == "delimiter" and not data.delimiter:
        refuse("data.delimiter", "nothing", "at least one character")
    if len(data.csv_delimiter) > 1 or data.csv_delimiter in ('"', "\n", "\r", " "):
        refuse("data.csv_delimiter", repr(data.csv_delimiter), "one character, such as ; or a tab, or none")
    if config.train.method == "sequential" and not data.separator:
        refuse("data.separator", "nothing", "at least one character")
