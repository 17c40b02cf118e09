"""Experiment configuration: frozen dataclasses, loading, overriding, and the checks that need no files.

A config file is a short Python file that assigns `config = Config(...)`. Standard library only.
"""

import dataclasses
import difflib
import json
import re
import runpy
import traceback
import typing
from pathlib import Path
from typing import Any

from pipejax.errors import UserError
from pipejax.fields import alternatives, check_fields, parse, setting, types_of
from pipejax.files import look

STRATEGIES = ("pipelined", "sequential")
OBJECTIVES = (*STRATEGIES, "none")
STOPS = ("empty_row", "literal")
FEED_FORWARDS = ("relu", "gated-gelu", "gated-silu")
SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "adafactor")
REMATS = ("none", "dots", "layers")
FREEZES = ("none", "encoder")
DTYPES = ("auto", "float32", "bfloat16")
ROWS = ("list", "delimiter", "sentences")
METRICS = ("spans", "keyphrases", "rouge")
GRID = 2**15  # at the most: places on the grid are counted in 32 bits
PLACES = 2**24  # of a grid at the most: beyond that no device holds what decoding keeps of each
SPACED = ("data.delimiter", "data.separator", "data.source_template")  # spaces at the ends of these count


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The architecture of a T5 (names as in Hugging Face's config.json where one exists)."""

    vocab_size: int = setting(least=2, most=2**24)
    d_model: int = setting(least=1, most=2**16)
    d_kv: int = setting(least=1, most=2**12)
    d_ff: int = setting(least=1, most=2**18)
    num_heads: int = setting(least=1, most=2**10)
    num_layers: int = setting(least=1, most=2**10)
    num_decoder_layers: int = setting(least=1, most=2**10)
    relative_attention_num_buckets: int = setting(32, least=4, most=2**16)
    relative_attention_max_distance: int = setting(128, least=4)
    dropout_rate: float = setting(0.1, least=0.0, below=1.0)
    layer_norm_epsilon: float = setting(1e-6, above=0.0)
    feed_forward: str = setting("relu", choices=FEED_FORWARDS)
    tied_head: bool = setting(True)  # the head is the embedding table (v1.0); False: lm_head/kernel (v1.1, mT5)
    scale_head: bool = setting(True)  # the decoder's output is multiplied by d_model**-0.5 before the head (v1.0)
    pad_token_id: int = setting(0, least=0)
    eos_token_id: int = setting(1, least=0)
    decoder_start_token_id: int = setting(0, least=0)


@dataclasses.dataclass(frozen=True)
class GridConfig:
    """The pipelined decoder's grid (paper section 3.4; times and rows are counts)."""

    delay: int = setting(1, least=1, most=GRID)  # Δt: a new row starts every `delay` time-steps
    time_max: int = setting(50, least=1, most=GRID)  # time-steps at the most
    sub_max: int = setting(20, least=1, most=GRID)  # rows at the most
    stop: str = setting("empty_row", choices=STOPS)  # "literal": Algorithm 1 as it is written


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where examples come from, and how long they may be (in tokens)."""

    task: str = setting("jsonl")
    train: str = setting("")  # paths of the tasks `jsonl` and `csv`; "" = none
    dev: str = setting("")
    test: str = setting("")
    source_template: str = setting("")  # `jsonl`, `csv`: "Title: {title} Context: {text}"; "" = the field "source"
    targets: str = setting("targets")  # `jsonl`, `csv`: the field that holds the rows
    rows: str = setting("list", choices=ROWS)  # `jsonl`, `csv`: what it is: a list, or text to part into rows
    delimiter: str = setting("\n")  # `jsonl`, `csv`: between the rows, if `rows` is "delimiter"
    metric: str = setting("", choices=("", *METRICS))  # "" = the task's own; for `jsonl` and `csv` that is "spans"
    data_dir: str = setting("")  # where `python -m pipejax.data prepare` wrote; "" = TFDS's own directory
    tokenizer: str = setting("")  # directory or hub id; "" = the task's own or that of `train.init_from`
    max_source: int = setting(2048, least=2, most=2**20)  # longer sources are cut here, eos kept
    max_target: int = setting(512, least=2, most=2**20)  # a longer target loses its last rows (training only)
    separator: str = setting(" ; ")  # between the rows of a sequential target and of the decoded text


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimisation. Steps are optimizer updates; a batch is counted in examples."""

    objective: str = setting("pipelined", choices=OBJECTIVES)  # "none": a converted checkpoint, never trained here
    steps: int = setting(1000, least=1)
    batch_size: int = setting(24, least=1, most=2**20)
    accumulate: int = setting(1, least=1)  # parts that a batch is computed in, one after the other
    pack: int = setting(0, least=0)  # examples whose targets share a row of slots, against padding; 0: see data.core
    length_group: int = setting(
        16, least=1, most=2**16
    )  # batches drawn together and parted by length, against padding; 1: none
    remat: str = setting("none", choices=REMATS)  # what the backward pass computes again: nothing, all but dots, layers
    shapes: int = setting(22, least=1)  # padded shapes of batches, at the most but for rare lengths: each compiles once
    optimizer: str = setting("adamw", choices=OPTIMIZERS)
    freeze: str = setting("none", choices=FREEZES)  # "encoder": it and the embedding table keep their values
    lora_rank: int = setting(
        0, least=0, most=2**16
    )  # of low-rank factors, which alone are trained; 0: none, all is trained
    learning_rate: float = setting(1e-4, above=0.0)
    schedule: str = setting("constant", choices=SCHEDULES)  # after the warm-up; the others fall to 0 at `steps`
    warmup_steps: int = setting(100, least=0)
    weight_decay: float = setting(0.0, least=0.0)
    beta1: float = setting(0.9, least=0.0, below=1.0)  # beta1, beta2 and epsilon are AdamW's
    beta2: float = setting(0.999, least=0.0, below=1.0)
    epsilon: float = setting(1e-8, above=0.0)
    clip_norm: float = setting(1.0, above=0.0)  # gradients are scaled down to this global norm
    dropout: float = setting(0.1, least=0.0, below=1.0)
    dtype: str = setting("auto", choices=DTYPES)  # of the computation; "auto": bfloat16 on GPU and TPU, else float32
    seed: int = setting(0, least=0, most=2**31 - 1)
    max_bad_steps: int = setting(10, least=1)  # steps in a row whose loss or gradient is not finite; then training ends
    init_from: str = setting("")  # a converted or trained checkpoint to start from; "" = random weights
    log_every: int = setting(50, least=1)
    evaluate_every: int = setting(500, least=1)
    evaluate_examples: int = setting(256, least=0)  # of the dev split; 0 = all of it
    patience: int = setting(0, least=0)  # evaluations in a row without a better one; then training ends; 0: never
    checkpoint_every: int = setting(500, least=1)
    keep_checkpoints: int = setting(3, least=1)  # the newest that stay on disk
    keep_every: int = setting(0, least=0)  # checkpoints of every multiple of this step stay as well; 0: none
    tensorboard: bool = setting(False)  # WORKDIR/tensorboard, too; needs tensorboardX
    wandb: str = setting("")  # a project of Weights & Biases, too; needs wandb


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Decoding settings that are not the grid's."""

    max_length: int = setting(512, least=1, most=2**20)  # tokens of the sequential decoder, eos included
    beams: int = setting(1, least=1)  # of the sequential decoder: 1 is greedy, more is beam search
    length_penalty: float = setting(1.0, least=-5.0, most=5.0)  # beams compare log-probability / length**this
    batch_size: int = setting(8, least=1, most=2**16)
    dtype: str = setting("auto", choices=DTYPES)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; data = -1 takes all that the other two leave."""

    data: int = setting(-1, least=-1)
    fsdp: int = setting(1, least=1)
    tensor: int = setting(1, least=1)


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment. `model` is None when the weights come from `train.init_from`."""

    name: str = setting("experiment")
    model: T5Config | None = setting(None)
    grid: GridConfig = dataclasses.field(default_factory=GridConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)


def load(path: str | Path, overrides: typing.Iterable[str] = ()) -> Config:
    """Runs a config file and applies `key=value` overrides.

    Raises:
      UserError: the file is absent, does not run or defines no `config`; a key is unknown; a value does not fit.
    """
    path = Path(path)
    if (found := look(path)) != "file":
        raise UserError(f"{path}: {'found a directory' if found else 'no such file'}; expected a config file")
    try:
        namespace = runpy.run_path(str(path))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        message = error.msg if isinstance(error, SyntaxError) else _first_line(error)
        keyword = re.search(r"unexpected keyword argument '(\w+)'$", message)  # newer Pythons give a hint themselves
        hint = _suggestion(keyword[1]) if keyword else ""
        raise UserError(f"{_place(error, path)}: {type(error).__name__}: {message}{hint}") from error
    config = namespace.get("config")
    if not isinstance(config, Config):
        raise UserError(f"{path}: found no `config = Config(...)`; expected one")
    check(config, where=str(path))
    return override(config, overrides)


def override(config: Config, assignments: typing.Iterable[str], *, flag: str = "--set") -> Config:
    """Applies assignments of the form `section.key=value`, left to right, and checks the result."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if key not in SPACED:
            text = text.strip()
        elif key == "data.delimiter" and text in (r"\n", r"\t"):
            raise UserError(f"{flag} {assignment}: found two characters; expected one: $'\\t' is a tab in bash")
        if not (key and equals):
            raise UserError(f"{flag} {assignment}: found no {'key' if equals else repr('=')}; expected key=value")
        config = _assign(config, key.split("."), text, key)
    check(config, where=flag)
    return config


def to_json(config: Config) -> str:
    """The resolved config as JSON text."""
    return json.dumps(dataclasses.asdict(config), indent=2, ensure_ascii=False) + "\n"


def from_json(text: str, *, where: str) -> Config:
    """Reads what `to_json` wrote; `where` names the file in errors."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({_first_line(error)})") from error
    config = _build(Config, values, "", where)
    check(config, where=where)
    return config


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """All leaves by dotted key, in order."""
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = prefix + field.name
        leaves |= flat(value, f"{key}.") if dataclasses.is_dataclass(value) else {key: value}
    return leaves


def check(config: Config, *, where: str) -> None:
    """Checks types, ranges and the rules between keys; raises a UserError that names the key."""
    check_fields(config, "", where)
    model = config.model
    if model is not None:
        for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
            if getattr(model, key) >= model.vocab_size:
                raise UserError(
                    f"{where}: model.{key}: found {getattr(model, key)}; expected an id below "
                    f"model.vocab_size = {model.vocab_size}"
                )
        if model.relative_attention_max_distance <= model.relative_attention_num_buckets // 2:
            raise UserError(
                f"{where}: model.relative_attention_max_distance: found "
                f"{model.relative_attention_max_distance}; expected more than half of the "
                f"{model.relative_attention_num_buckets} buckets"
            )
        if 2 * config.decode.beams > model.vocab_size:
            raise UserError(
                f"{where}: decode.beams: found {config.decode.beams}; expected at most half of model.vocab_size = "
                f"{model.vocab_size}"
            )
    if (places := config.grid.time_max * config.grid.sub_max) > PLACES:
        raise UserError(
            f"{where}: grid: found {places} places, time_max {config.grid.time_max} x sub_max {config.grid.sub_max}; "
            f"expected at most {PLACES}"
        )
    if config.mesh.data == 0:
        raise UserError(f"{where}: mesh.data: found 0; expected -1 or at least 1")
    if config.data.rows == "delimiter" and not config.data.delimiter:
        raise UserError(f"{where}: data.delimiter: found nothing; expected at least one character")
    if config.train.objective == "sequential" and not config.data.separator:
        raise UserError(f"{where}: data.separator: found nothing; expected at least one character")


def _assign(node: Any, keys: list[str], text: str, full: str) -> Any:
    names = [field.name for field in dataclasses.fields(node)]
    if keys[0] not in names:
        raise UserError(f"{full}: unknown key{_suggestion(full)}")
    value = getattr(node, keys[0])
    kind = types_of(type(node))[keys[0]]
    if len(keys) > 1:
        if value is None:
            raise UserError(f"{full}: found no {keys[0]} in this config; expected it there to set one of its keys")
        if not dataclasses.is_dataclass(value):
            parent = full.removesuffix("." + ".".join(keys[1:]))
            raise UserError(f"{full}: {keys[0]} is no section (did you mean {parent}?)")
        return dataclasses.replace(node, **{keys[0]: _assign(value, keys[1:], text, full)})
    if dataclasses.is_dataclass(value) or kind not in (int, float, bool, str):
        raise UserError(f"{full}: found a section; expected one of its keys, such as {_example(full, value)}")
    return dataclasses.replace(node, **{keys[0]: parse(text, kind, full)})


def _build(cls: type, values: Any, prefix: str, where: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{where}: {prefix[:-1] or 'top level'}: found {type(values).__name__}; expected an object")
    kinds = types_of(cls)
    for key in values:
        if key not in kinds:
            raise UserError(f"{where}: {prefix}{key}: unknown key{_suggestion(prefix + key)}")
    built = {}
    for key, value in values.items():
        section = next(
            (k for k in alternatives(kinds[key]) if isinstance(k, type) and dataclasses.is_dataclass(k)), None
        )
        built[key] = _build(section, value, f"{prefix}{key}.", where) if section and value is not None else value
    try:
        return cls(**built)
    except TypeError as error:
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.name not in built and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        raise UserError(f"{where}: {prefix}{missing[0] if missing else ''}: missing") from error


def _suggestion(key: str) -> str:
    every = [*flat(Config()), *(f"model.{f.name}" for f in dataclasses.fields(T5Config))]
    section, _, name = key.rpartition(".")
    names = [k.rpartition(".")[2] for k in every]
    close = [name] if name in names else difflib.get_close_matches(name, names, n=1)
    if close:  # of several keys with that name the one whose section is the most alike
        candidates = [k for k, known in zip(every, names, strict=True) if known == close[0]]
        return f" (did you mean {difflib.get_close_matches(key, candidates, n=1, cutoff=0.0)[0]}?)"
    siblings = [k.removeprefix(f"{section}.") for k in every if k.startswith(f"{section}.")]
    if siblings:
        return f"; the keys of {section} are {', '.join(siblings)}"
    return f"; the sections are {', '.join(types_of(Config))}"


def _example(key: str, value: Any) -> str:
    section = value if dataclasses.is_dataclass(value) else T5Config
    return f"{key}.{dataclasses.fields(section)[0].name}"


def _place(error: BaseException, path: Path) -> str:
    """FILE:LINE: the line of the config file that raised the error, or any file's that is no Python."""
    if isinstance(error, SyntaxError):
        file = error.filename or str(path)
        return f"{file}:{error.lineno}" if error.lineno else file
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
