"""Manifests with a correct seal and wrong content, and configs that do not fit the arrays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.faults import refusals
from lab.faults.refusals import DECODE, Kind
from lab.faults.runs import Commands
from support.manifests import seal

STEP = "run/checkpoints/4"
NORM = "encoder/norm/scale"  # a parameter
OTHER_SIZES = {
    "vocab_size": (63, 65, 2**20),
    "d_model": (15, 17, 2**15),
    "d_kv": (3, 5, 2**10),
    "d_ff": (23, 25, 2**15),
    "num_heads": (2, 8),
    "num_layers": (2, 1000),
    "num_decoder_layers": (2, 1000),
    "relative_attention_num_buckets": (16, 64),
}


def _forge(here: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    (path,) = (here / STEP / "manifest").glob("metadata")
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(seal(body)))


def _kind(name: str, change: Callable[[dict[str, Any]], Any], *words: str) -> Kind:
    return Kind(f"forged: {name}", (STEP.rpartition("/")[0], *words), "decode", DECODE, lambda h: _forge(h, change))


def _put(key: str, value: Any, *words: str) -> Kind:
    """A manifest with another value for a dotted key; `...` removes the key."""
    *parents, last = key.split(".")

    def change(body: dict[str, Any]) -> None:
        for parent in parents:
            body = body[parent]
        if value is ...:
            del body[last]
        else:
            body[last] = value

    return _kind(f"{key} = {'nothing' if value is ... else repr(value)[:40]}", change, *(words or (key,)))


def _each(key: str, values: list[Any], *words: str) -> list[Kind]:
    return [_put(key, value, *words) for value in values]


def _entry(value: Any, path: str = NORM) -> Kind:
    """A manifest with another entry for a parameter."""
    name = f"arrays of {path!r:.40} = {repr(value)[:40]}"
    return _kind(name, lambda body: body["arrays"]["params"].update({path: value}), path.rpartition("/")[2])


SHAPES: list[Any] = ["16", [16.0], [True], [-16], [17], [16, 1], [2**62], []]
GOOD: list[Any] = ["float32", [16], 1, 2]
LENGTHS: dict[str, Any] = {"levels": [8, 16], "pairs": [[16, 16], [8, 8]], "limit": [64, 64], "means": [7.5, 9.0]}
FALSE_SHAPES: list[Any] = [
    *(None, 5, [], "x", {}),
    *(LENGTHS | {key: value} for key in LENGTHS for value in (None, 5, "xy", [], [1, "2"], [True, 1], [[1, 2, 3]])),
    *(LENGTHS | {"levels": levels} for levels in ([16, 8], [0, 8], [8.0], [10**30])),
    *(LENGTHS | {"pairs": pairs} for pairs in ([[8, 8], [16, 8]], [[8]], [[8, -8]], [[8, 10**30]])),
    *(LENGTHS | {"means": means} for means in ([0, 1.0], [1.0, float("nan")], [1.0, 2.0, 3.0], [10**400, 1.0])),
]
KINDS = (
    *_each("format", ["1", True, 1.0, 2, None, [1], ...], "format", "the number 1"),
    *_each("step", ["4", 4.0, True, None, {}, ...]),
    *_each("step", [99, -4, 10**30], "no intact step"),  # the number of another step counts as damage
    *_each("arrays", [[], "params", None, 3, {}, {"../x": {}}, {"state": {}}, ...]),
    *_each("arrays.params", [[], "params", None, 3]),
    _put("arrays.params", {}, "params"),
    _put(f"arrays.params.{NORM}", ..., NORM, "missing"),
    *map(_entry, ["x", [], GOOD[:3], [*GOOD, 3], {}, None]),
    *map(_entry, ([dtype, *GOOD[1:]] for dtype in (3, "float99", "float64", "U4", "object"))),
    *map(_entry, (["float32", shape, 1, 2] for shape in SHAPES)),
    *map(_entry, (["float32", [16], *numbers] for numbers in (("1", 2), (1.5, 2), (1, None), (True, 2)))),
    *(_entry(GOOD, path) for path in ("", "/x", "x/", "a//b", f"{NORM}/more", "encoder", "lora_a", "x/lora_a")),
    _entry(["float32", [16, 4], 1, 2], "encoder/layers_0/attention/query/lora_a"),  # without the second factor, lora_b
    *_each("metadata", [[], "x", None, {"data": 3}, {"score": "x"}, {"score": ["x"]}, ...]),
    *_each("metadata", [{"tokenizer": []}, {"tokenizer": "x"}, {"tokenizer": {"tokenizer.json": 3}}]),
    *_each("metadata", [{"shapes": shapes} for shapes in FALSE_SHAPES]),
    *_each("files", [5, [], "x", True, {"params/_METADATA": 3}]),
    *_each("versions", [[], "x", None, {"jax": 3}, ...]),
    *_each("config", [[], "x", None, 3, ...]),
    *_each("config.model", [[], "x", 3], "model: found"),
    *_each("config.train", [[], "x", 3], "train: found"),
    *_each("config.grid", [[], "x", 3], "grid: found"),
    _put("config.model", None, "without a model"),
    _put("config.nonsense", 3, "nonsense: unknown key"),
    _put("config.model.d_ff", ..., "d_ff: missing"),
    *(_put(f"config.model.{key}", size, "params") for key, sizes in OTHER_SIZES.items() for size in sizes),
    *(_put(f"config.model.{key}", 10**30, key) for key in OTHER_SIZES),
    *_each("config.model.d_model", ["16", 16.0, True, None, -16, 10**400], "d_model"),
    _kind("heads and widths swapped", lambda b: b["config"]["model"].update(num_heads=2, d_kv=8), "num_heads"),
    _put("config.model.feed_forward", "gated-gelu", "params"),
    _put("config.model.tied_head", False, "lm_head"),
    _put("config.model.eos_token_id", 64, "eos_token_id"),
    _put("config.model.layer_norm_epsilon", float("nan"), "layer_norm_epsilon"),
    _put("config.train.learning_rate", 10**400, "learning_rate"),
    _put("config.decode.batch_size", 10**30, "batch_size"),
    _put("config.decode.max_length", 10**9, "max_length"),
    _put("metadata.tokenizer", {"tokenizer.json": "0" * 64}, "tokenizer.json")._replace(words=("run/tokenizer",)),
    _kind("a grid that is too large", lambda b: b["config"]["grid"].update(time_max=2**15, sub_max=2**15), "grid"),
    _put("config.data.separator", 3, "separator"),
    _put("config.data.max_source", 10**12, "max_source"),
)


def many(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Decodes with all forged manifests."""
    results = refusals.many(commands, scratch, KINDS)
    return {"forgeries": len(results), **refusals.summary(results)}
