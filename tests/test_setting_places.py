"""Where each setting may be given: for each command, call and request, the keys that it takes, as literal lists."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipejax import config as config_lib
from pipejax import methods
from pipejax.apps.export import programs_as_files
from pipejax.apps.probe import measuring
from pipejax.apps.serving import requests
from pipejax.apps.teach import labels, lessons
from pipejax.checkpoint import Restored
from pipejax.config import Config, DataConfig, DecodeConfig, MeshConfig, TrainConfig
from pipejax.inference import settings
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.offline.resume import first_difference, settings_of
from pipejax.system import fields
from pipejax.system.errors import UserError
from pipejax.training.run_directory import check_places, check_resume
from support.tiny import MODEL

CONFIG = Config(
    model=MODEL,
    data=DataConfig(task="none"),
    train=TrainConfig(method="none", init_from="y"),
    mesh=MeshConfig(data=1),
)
GRID = {"delay", "time_max", "sub_max", "stop", "row_names"}
DECODE = {
    *(
        "max_length",
        "beams",
        "length_penalty",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "samples",
        "unique_rows",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "repetition_scope",
        "rules",
    ),
    *("scores", "limit", "draft", "draft_checkpoint", "draft_tokens", "trace", "batch_size", "dtype", "weights"),
}
DATA = {
    *("task", "train", "dev", "test", "stream", "split", "split_seed", "csv_delimiter", "csv_quotes", "skip_bad"),
    *("empty_targets", "source_template", "targets", "rows", "delimiter", "metric", "data_dir", "tokenizer"),
    *("new_tokenizer", "special_tokens", "max_source", "max_target", "separator"),
}
TRAIN = {
    *("method", "steps", "batch_size", "accumulate", "pack", "length_group", "remat", "shapes", "optimizer"),
    *("freeze", "lora_rank", "learning_rate", "schedule", "warmup_steps", "warmup_share", "weight_decay", "beta1"),
    *("beta2", "epsilon", "clip_norm", "dropout", "new_dropout", "dtype", "seed", "max_bad_steps", "init_from"),
    *("init_best", "eos_token_id", "log_every", "evaluate_every", "evaluate_examples", "patience"),
    *("checkpoint_every", "keep_checkpoints", "keep_every", "tensorboard", "wandb", "mlflow"),
}
SECTIONS = {"grid": GRID, "decode": DECODE, "data": DATA, "train": TRAIN, "mesh": {"data", "fsdp", "tensor"}}


def keys(*names: str) -> set[str]:
    """Keys as given, with the name of a section as all of its keys."""
    return {key for name in names for key in ([f"{name}.{x}" for x in SECTIONS[name]] if name in SECTIONS else [name])}


EVERY = keys("name", *SECTIONS)
DECODED = keys("grid", "decode", *(f"data.{x}" for x in ("max_source", "separator", "csv_delimiter", "csv_quotes")))
TAKEN = {  # by command; all also take model=MODULE:CLASS, and decode, export and probe take a method
    "decode": DECODED,
    "export": keys("grid", "decode"),
    "probe": keys("data", "decode.dtype", "train.dtype", "train.learning_rate"),
    "teach": (
        keys("name", "grid", "decode", "train", "mesh")
        | {f"data.{x}" for x in ("max_source", "max_target", "separator", "csv_delimiter", "csv_quotes", "metric")}
    )
    - {"train.method", "train.init_from", "train.init_best"},
}
CHANGEABLE = {
    *("name", "data.test", "mesh.data", "mesh.fsdp", "mesh.tensor", "train.shapes", "train.steps", "train.log_every"),
    *("train.checkpoint_every", "train.evaluate_every", "train.evaluate_examples", "train.new_dropout"),
    *("train.patience", "train.keep_checkpoints", "train.keep_every", "train.tensorboard", "train.wandb"),
    *("train.mlflow", "decode.draft", "decode.draft_tokens", "decode.draft_checkpoint"),
}
BY_CONTENT = {
    *("data.train", "data.dev", "data.data_dir", "data.split", "data.split_seed", "data.csv_delimiter"),
    *("data.csv_quotes", "data.skip_bad", "data.tokenizer", "train.init_from", "train.init_best"),
}
VALUES = {  # for keys for which `other` gives no legal value
    "grid.row_names": '["x"]',
    "data.targets": '["x","y"]',
    "data.csv_delimiter": ";",
    "data.special_tokens": "eos",
    "decode.draft": "source",
    "decode.rules": "pipejax.decoding:Allowed",
    "mesh.data": "3",
}


def other(key: str) -> str:
    """A legal value of a setting that is not its default, for --set."""
    if key in VALUES:
        return VALUES[key]
    section, _, name = key.rpartition(".")
    cls = type(getattr(Config(), section)) if section else Config
    default = getattr(cls(), name)
    [field] = [field for field in dataclasses.fields(cls) if field.name == name]
    if choices := field.metadata.get("choices"):
        return next(x for x in choices if x not in (default, "none", ""))
    if isinstance(default, bool):
        return str(not default).lower()
    return (
        str(default + 3 if default < 60 else 59)
        if isinstance(default, int)
        else {float: "0.25", str: "x"}[type(default)]
    )


def changed(*names: str) -> Config:
    return config_lib.override(CONFIG, [f"{key}={other(key)}" for key in names])


def refused(call: Callable[[], object]) -> str:
    """The message of the UserError that a call raises; "" if it raises none."""
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


def give(command: str, setting: str) -> None:
    """Passes a setting to a command, with a checkpoint that does not exist if the command opens one itself."""
    if command == "decode":
        load("/nowhere/x", overrides=[setting])
    elif command == "export":
        programs_as_files.export("/nowhere/x", "/nowhere/out", platforms=["cpu"], overrides=[setting])
    elif command == "probe":
        measuring.prepare("/nowhere/x", "y", None, best=False, limit=None, most=1, overrides=[setting])
    else:
        lessons.lesson(CONFIG, "/nowhere/x", [setting])


def test_lists_above_name_every_key() -> None:
    assert config_lib.flat(Config()).keys() == EVERY | {"model", "method", "auxiliary"}


@pytest.mark.parametrize("command", TAKEN)
def test_command_takes_exactly_these_keys(command: str) -> None:
    said = {key: refused(lambda: give(command, f"{key}={other(key)}")) for key in EVERY}  # noqa: B023
    assert {key for key, message in said.items() if "cannot be changed" not in message} == TAKEN[command]


@pytest.mark.parametrize("command", TAKEN)
def test_command_takes_backbone_by_class_alone(command: str) -> None:
    assert "cannot be changed" not in refused(lambda: give(command, "model=pipejax.model.t5_config:T5Config"))
    assert "cannot be changed" in refused(lambda: give(command, "model.dropout_rate=0.5"))


@pytest.mark.parametrize("setting", ["method=tests:X", "method.delay=2"])
def test_commands_that_write_answers_take_methods(setting: str) -> None:
    for command in ("decode", "export", "probe"):
        assert "cannot be changed" not in refused(lambda: give(command, setting))  # noqa: B023


def test_call_takes_settings_that_need_no_new_weights() -> None:
    def call(section: str, name: str) -> str:
        value = getattr(getattr(changed(f"{section}.{name}"), section), name)
        return refused(lambda: settings.of_call(CONFIG, "decode", {name: value}, drafter=None, without={}))

    said = {name: call(section, name) for section in ("decode", "grid") for name in SECTIONS[section]}
    assert settings.NAMES.keys() == said.keys()
    loaded = {name for name, message in said.items() if "which no call can change" in message}
    assert loaded == {"weights", "dtype", "draft_checkpoint"}


def test_request_may_send_these_settings() -> None:
    for form in (requests.COMPLETIONS, requests.CHAT, requests.RESPONSES):
        assert DECODE & {*form.fields} == {
            *("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "no_repeat_ngram_size")
        }


def test_exported_programs_follow_these_settings() -> None:
    followed = {field.name for field in dataclasses.fields(DecodeConfig) if field.metadata.get("exported")}
    expected = {"max_length", "beams", "length_penalty", "draft", "draft_tokens", "batch_size", "dtype", "weights"}
    assert followed == expected


def test_spaces_at_the_ends_count_in_these_keys() -> None:
    found = {key for key in EVERY if config_lib.assignments([f"{key}= x "], "--set")[0].value == " x "}
    assert found == keys("data.delimiter", "data.csv_delimiter", "data.separator", "data.source_template")


def test_resumed_run_may_change_these_keys() -> None:
    plain = changed()
    free = {key for key in EVERY if not refused(lambda: check_resume(plain, changed(key), Path("run")))}  # noqa: B023
    assert free == CHANGEABLE | BY_CONTENT
    saved = cast(Restored, SimpleNamespace(config=plain, metadata={}))
    data = {"data": "1", "dev": "2"}
    held = {key for key in EVERY if refused(lambda: check_places(saved, changed(key), data, Path("run")))}  # noqa: B023
    assert held == BY_CONTENT


def test_examples_with_the_same_content_may_be_elsewhere() -> None:
    data = {"data": "1", "dev": "2"}
    saved = cast(Restored, SimpleNamespace(config=changed(), metadata=data))
    held = {key for key in EVERY if refused(lambda: check_places(saved, changed(key), data, Path("run")))}  # noqa: B023
    assert held == keys("data.tokenizer", "train.init_from", "train.init_best")
    others = {"data": "1", "dev": "3"}
    held = {key for key in EVERY if refused(lambda: check_places(saved, changed(key), others, Path("run")))}  # noqa: B023
    assert held == BY_CONTENT - {"data.train"}


@dataclasses.dataclass(frozen=True)
class Unable(methods.Method):
    """A method without any ability."""

    name = "unable"


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("temperature", 0.5, "decode.temperature: found 0.5 with unable decoding, which does not "),
        ("scores", True, "decode.scores: found True with unable decoding, which does not "),
        ("limit", "source", "decode.limit: found source with unable decoding, which does not "),
        ("repetition_penalty", 1.5, "decode.repetition_penalty: found 1.5 with unable decoding, which does not "),
        ("no_repeat_ngram_size", 2, "decode.no_repeat_ngram_size: found 2 with unable decoding, which does not "),
        ("rules", "a:B", "decode.rules: found a:B with unable decoding, which does not "),
        ("draft", "source", "decode.draft: found source with unable decoding, which does not "),
    ],
)
def test_method_without_the_ability_is_refused(key: str, value: Any, message: str) -> None:
    decode = dataclasses.replace(CONFIG.decode, **{key: value})
    assert refused(lambda: methods.check(Unable(), decode)).startswith(message)


def test_settings_that_ask_for_no_ability() -> None:
    """All other keys of `decode` accept any value with a method without abilities."""
    asking = {"temperature", "scores", "limit", "draft", "repetition_penalty", "no_repeat_ngram_size", "rules"}
    for name in DECODE - asking - {"samples", "trace"}:
        assert not refused(lambda: methods.check(Unable(), changed(f"decode.{name}").decode)), name  # noqa: B023


def test_settings_that_a_method_does_not_read_are_named() -> None:
    unread = keys(
        *("grid", "decode.max_length"),
        *(f"decode.{x}" for x in ("top_k", "top_p", "min_p", "seed", "draft_tokens", "repetition_scope")),
    )

    def named(method: methods.Method) -> set[str]:
        lines = [methods.ignored_settings(method, CONFIG, (key,)) for key in EVERY - {"decode.temperature"}]
        return {line[0].partition(":")[0] for line in lines if line}

    assert named(Unable()) == unread
    assert named(methods.make("pipelined", CONFIG)) == {"decode.max_length"}
    assert named(methods.make("sequential", CONFIG)) == keys("grid")
    assert named(methods.make("sequential", changed("decode.beams"))) == unread - {"decode.max_length"}


def test_records_depend_on_these_settings(tmp_path: Path) -> None:
    def noted(config: Config) -> dict[str, object]:
        made = SimpleNamespace(config=config, tokenizer=None, architecture=MODEL, origin={})
        return settings_of(cast(Generator, made), "sequential", [])

    made = cast(Generator, SimpleNamespace(config=CONFIG, tokenizer=None, architecture=MODEL, origin={}))
    speed = {"decode.batch_size", "decode.draft", "decode.draft_tokens", "decode.draft_checkpoint"}
    ours = keys("grid", "decode", "data.max_source", "data.separator")
    more = {"input", "weights", "--method"}
    assert noted(CONFIG).keys() == ours - speed | more
    traced = config_lib.override(CONFIG, ["decode.trace=true"])
    assert noted(traced).keys() == ours - {"decode.batch_size"} | more
    labels.note_settings(tmp_path, made, [], method="sequential", held_out=3)
    labelled = json.loads((tmp_path / labels.SETTINGS).read_text())
    assert labelled.keys() == keys("decode", "data.max_source") - speed | more | {"held_out"}


def test_note_without_a_key_of_a_later_version_has_its_default() -> None:
    for key in keys("grid", "decode", "data.csv_delimiter", "data.csv_quotes"):
        section, _, name = key.partition(".")
        default = getattr(getattr(Config(), section), name)
        assert not first_difference({key: list(default) if isinstance(default, tuple) else default}, {}), key
    assert not first_difference({"--skip-bad": False}, {})


def test_lesson_divides_these_counts_of_updates() -> None:
    kinds = fields.types_of(TrainConfig)
    counts = {name: 400 for name in TRAIN - {"accumulate", "pack", "eos_token_id", "lora_rank"} if kinds[name] is int}
    full: TrainConfig = dataclasses.replace(CONFIG.train, method="sequential", **counts)  # type: ignore[arg-type]
    made = lessons.lesson(dataclasses.replace(CONFIG, train=full), "/nowhere/x", []).train
    divided = {name for name in counts if getattr(made, name) == 100}
    assert divided == {"steps", "warmup_steps", "log_every", "evaluate_every", "checkpoint_every"}
