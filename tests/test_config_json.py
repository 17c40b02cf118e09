"""Keys of config.json are read as transformers' config classes read them: absent, null, and as older releases wrote."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig
from transformers.models.t5gemma2.configuration_t5gemma2 import (
    T5Gemma2DecoderConfig,
    T5Gemma2EncoderConfig,
    T5Gemma2TextConfig,
)

from pipejax.backbones import t5gemma, t5gemma2, umt5
from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.backbones.umt5 import UMT5Config
from pipejax.config import Config, DecodeConfig, TrainConfig, check
from pipejax.convert.huggingface import read_hf, write_hf
from pipejax.inference.generator import Generator
from pipejax.methods.losses import cross_entropy
from pipejax.model import t5_config
from pipejax.model.config_json import REFUSED, REQUIRED, Keys
from pipejax.model.t5_config import T5Config
from pipejax.system.errors import UserError
from support.in_transformers import VISION

ABSENT = object()
SIDES = ("encoder", "decoder")
Facts = dict[str, Any]
CLASSES: dict[str, Any] = {
    "t5": (T5Config, transformers.T5Config),
    "mt5": (T5Config, transformers.MT5Config),
    "umt5": (UMT5Config, transformers.UMT5Config),
    "t5gemma": (T5GemmaConfig, transformers.T5GemmaConfig),
    "t5gemma2": (T5Gemma2Config, transformers.T5Gemma2Config),
}
# The tables of keys, each with the class of the object that it describes.
TABLES: dict[str, tuple[Keys, Any]] = {
    "t5": (t5_config.KEYS, transformers.T5Config),
    "mt5": (t5_config.MT5_KEYS, transformers.MT5Config),
    "umt5": (umt5.KEYS, transformers.UMT5Config),
    "t5gemma": (t5gemma.KEYS, transformers.T5GemmaConfig),
    "t5gemma side": (t5gemma.SIDE, T5GemmaModuleConfig),
    "t5gemma2": (t5gemma2.KEYS, transformers.T5Gemma2Config),
    "t5gemma2 encoder": (t5gemma2.ENCODER, T5Gemma2EncoderConfig),
    "t5gemma2 text": (t5gemma2.SIDE, T5Gemma2TextConfig),
    "t5gemma2 decoder": (t5gemma2.SIDE, T5Gemma2DecoderConfig),
}
# Keys that transformers' classes have under another name, or not at all until a file has them.
LEGACY = {
    *("num_hidden_layers", "rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern"),
    "decoder_start_token_id",
}


def config_of(kind: str, facts: Facts) -> Any:
    """The config of transformers for a file."""
    given = {key: value for key, value in copy.deepcopy(facts).items() if key != "model_type"}
    if kind == "t5gemma2":
        given["encoder"] = {"vision_config": VISION, "mm_tokens_per_image": 4} | (given.get("encoder") or {})
    return CLASSES[kind][1](**given)


def stack_of(config: Any, *, is_capped: bool) -> GemmaStack:
    """A side of a T5Gemma from its config in transformers."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    values = {key: getattr(config, key) for key in (*names, "query_pre_attn_scalar", "sliding_window")}
    full, rope = config.layer_types, config.rope_parameters
    values["full_every"] = full.index("full_attention") + 1 if "full_attention" in full else len(full) + 1
    values["attn_logit_softcapping"] = (config.attn_logit_softcapping or 0.0) if is_capped else 0.0
    sliding, whole = (rope["sliding_attention"], rope["full_attention"]) if "full_attention" in rope else (rope, rope)
    values |= {"rope_theta": sliding["rope_theta"], "full_rope_theta": whole["rope_theta"]}
    # transformers reads the older name "type" only for the layer types that the stack uses.
    values["full_rope_factor"] = whole["factor"] if whole.get("rope_type", whole.get("type")) == "linear" else 1.0
    groups = values["num_attention_heads"] % values["num_key_value_heads"] == 0
    assert groups and None not in values.values(), "no model"
    return GemmaStack(**values)


def expected(kind: str, facts: Facts) -> Facts:
    """The expected result of `read_facts`, from transformers' config."""
    config = config_of(kind, facts)
    if kind in ("t5gemma", "t5gemma2"):
        encoder, decoder = config.encoder.text_config if kind == "t5gemma2" else config.encoder, config.decoder
        ids = transformers.GenerationConfig.from_model_config(config)
        start = ids.bos_token_id if ids.decoder_start_token_id is None else ids.decoder_start_token_id
        more = {} if kind == "t5gemma" else {"eoi_token_index": -1 if (x := config.eoi_token_index) is None else x}
        return more | {
            "vocab_size": decoder.vocab_size,
            "num_layers": encoder.num_hidden_layers,
            "num_decoder_layers": decoder.num_hidden_layers,
            "encoder": stack_of(encoder, is_capped=kind == "t5gemma"),
            "decoder": stack_of(decoder, is_capped=kind == "t5gemma"),
            "final_logit_softcapping": decoder.final_logit_softcapping or 0.0,
            "rms_norm_eps": decoder.rms_norm_eps,
            "dropout_rate": config.dropout_rate,
            "tied_head": config.tie_word_embeddings,
            "pad_token_id": ids.pad_token_id,
            "eos_token_id": ids.eos_token_id,
            "decoder_start_token_id": start,
        }
    names = {"relu": (False, "relu"), "gated-gelu": (True, "gelu_new"), "gated-silu": (True, "silu")}
    network = bool(config.is_gated_act), config.dense_act_fn
    scaled = {"t5": lambda: bool(config.scale_decoder_outputs), "mt5": lambda: False}
    # transformers 5 ignores the key for a UMT5: see the tests of UMT5.
    scales = scaled.get(kind, lambda: facts.get("tie_word_embeddings") is not False)()
    same = {key: getattr(config, key, None) for key in vars(t5_config.ARCHITECTURES["base"])}
    del same["tied_head"], same["other_eos_token_ids"]
    buckets, most = config.relative_attention_num_buckets, config.relative_attention_max_distance
    sizes = [
        x for key, x in same.items() if not key.endswith("_token_id") and key not in ("feed_forward", "scale_head")
    ]
    assert None not in sizes and most > buckets // 2, "no model"
    return same | {"feed_forward": next(x for x, y in names.items() if y == network), "scale_head": scales}


def whole(kind: str) -> Facts:
    """The content of a config.json with every key, and with values that differ from all defaults."""
    if kind in ("t5", "mt5", "umt5"):
        return {
            "model_type": kind,
            "vocab_size": 60,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_heads": 2,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
            "dropout_rate": 0.25,
            "layer_norm_epsilon": 1e-3,
            "feed_forward_proj": "gated-silu",
            "tie_word_embeddings": False,
            "pad_token_id": 3,
            "eos_token_id": 4,
            "decoder_start_token_id": 5,
        }
    side: Facts = {
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-3,
        "query_pre_attn_scalar": 2,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "pad_token_id": 3,
        "eos_token_id": 4,
        "bos_token_id": 5,
    }
    if kind == "t5gemma2":
        full = {"rope_type": "linear", "rope_theta": 70.0, "factor": 1.5}
        side["rope_parameters"] = {"full_attention": full, "sliding_attention": {"rope_theta": 50.0}}
    encoder = {"text_config": side, "eoi_token_index": 7} if kind == "t5gemma2" else copy.deepcopy(side)
    facts = {"model_type": kind, "dropout_rate": 0.25, "encoder": encoder, "decoder": copy.deepcopy(side)}
    return copy.deepcopy(facts)


def objects(kind: str) -> dict[str, tuple[str, ...]]:
    """The objects of a config.json, each with the keys on the way to it."""
    ways: list[tuple[str, ...]] = [()]
    if kind == "t5gemma":
        ways += [("encoder",), ("decoder",)]
    elif kind == "t5gemma2":
        ways += [("encoder", "text_config"), ("decoder",), ("encoder",)]
    return {".".join(way): way for way in ways}


def at(facts: Facts, way: tuple[str, ...]) -> Facts:
    for key in way:
        facts = facts[key]
    return facts


def keys_at(kind: str, way: tuple[str, ...]) -> Keys:
    keys = TABLES[kind][0]
    for key in way:
        keys = keys[key].keys
    return keys


Change = tuple[tuple[str, ...], Facts]  # the keys on the way to an object, and its new content


def cases(kind: str) -> Iterator[tuple[str, list[Change]]]:
    """Yields cases for every key: absent, null, and under each of its names, alone or beside the usual name."""
    sides = [way for way in objects(kind).values() if way[-1:] != () and "layer_types" in keys_at(kind, way)]
    for name, way in objects(kind).items():
        for key, row in keys_at(kind, way).items():
            if key == "model_type":
                continue
            given = at(whole(kind), way).get(key, 3)
            changes: dict[str, Facts] = {"absent": {key: ABSENT}, "null": {key: None}}
            changes |= {other: {key: ABSENT, other: given} for other in row.names}
            changes |= {f"{other} beside it": {other: 2} for other in row.names}
            for what, change in changes.items():
                places = [(way, change)]
                if key in ("vocab_size", "rms_norm_eps", "hidden_size") and sides:  # equal on both sides
                    places = [(side, change) for side in sides]
                elif row.keys:  # both sides, as they must match
                    places = [
                        (way, change),
                        ((), {"decoder": change[key]} if way else dict.fromkeys(SIDES, change[key])),
                    ]
                yield f"{name}.{key} {what}", places


def changed(facts: Facts, way: tuple[str, ...], change: Facts) -> Facts:
    facts = copy.deepcopy(facts)
    part = at(facts, way)
    part |= change
    for key in [key for key, value in part.items() if value is ABSENT]:
        del part[key]
    return facts


def check_read(kind: str, facts: Facts) -> str:
    """Compares reading a file with transformers; returns the reason if both refuse it."""
    backbone = CLASSES[kind][0]
    try:
        wanted = expected(kind, facts)
    except Exception:  # transformers raises exceptions of many kinds for an invalid value
        with pytest.raises(UserError) as refused:
            check(Config(model=backbone(**backbone.read_facts(facts))), where="config.json")
        return str(refused.value)
    assert backbone.read_facts(facts) == wanted
    return ""


def failures(kind: str, files: Mapping[str, Facts], refused: str = "") -> list[str]:
    """Returns a line for each file that is read differently from transformers, or refused with another message."""
    found = []
    for name, facts in files.items():
        try:
            message = check_read(kind, facts)
            assert not message or re.match(refused, message), message
        except (Exception, pytest.fail.Exception) as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("kind", CLASSES)
def test_keys_are_read_as_in_config_class(kind: str) -> None:
    files: dict[str, Facts] = {}
    for name, places in cases(kind):
        files[name] = whole(kind)
        for way, change in places:
            files[name] = changed(files[name], way, change)
    assert len(files) > 30 and failures(kind, files) == []


def test_only_model_type_is_required() -> None:
    for kind in CLASSES:
        assert not check_read(kind, {"model_type": kind}), kind
        assert not check_read(kind, whole(kind)), kind
    assert not check_read("t5gemma2", {"model_type": "t5gemma2", "encoder": {"text_config": None}, "decoder": None})
    with pytest.raises(UserError, match=r"^model_type: missing; expected"):
        T5Config.read_facts({})


@pytest.mark.parametrize("name", TABLES)
def test_defaults_equal_config_class(name: str) -> None:
    """Compares each row of the table; a default of None is computed from other keys."""
    keys, kind = TABLES[name]
    config = kind()
    for key, row in keys.items():
        if row.default is REQUIRED or row.default is None or row.keys or key in LEGACY:
            continue
        found = getattr(config, key)
        assert (0.0 if found is None and key.endswith("softcapping") else found) == row.default, key


class Watched(dict[str, Any]):
    """An object of config.json that records which of its keys were read."""

    def __init__(self, facts: Mapping[str, Any], read: set[str], where: str = "") -> None:
        inner = {key: Watched(x, read, f"{where}{key}.") if isinstance(x, dict) else x for key, x in facts.items()}
        super().__init__(inner)
        self.read, self.where = read, where

    def __getitem__(self, key: str) -> Any:
        self.read.add(self.where + key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(f"{self.where}{key}")
        return super().__contains__(key)

    def get(self, key: str, *default: Any) -> Any:
        self.read.add(self.where + key)
        return super().get(key, *default)


@pytest.mark.parametrize("kind", CLASSES)
def test_only_keys_in_tables_are_read(kind: str) -> None:
    read: set[str] = set()
    CLASSES[kind][0].read_facts(Watched(whole(kind), read))
    known = {
        ".".join((*way, name))
        for way in objects(kind).values()
        for key, row in keys_at(kind, way).items()
        for name in (key, *row.names)
    }
    assert read and {key for key in read if "rope_parameters." not in key} <= known


ROPES: dict[str, Facts] = {
    "theta alone": {"rope_parameters": ABSENT, "rope_theta": 30.0},
    "theta that is a whole number": {"rope_parameters": ABSENT, "rope_theta": 30},
    "theta beside parameters": {"rope_theta": 30.0},
    "theta of null beside parameters": {"rope_theta": None},
    "theta of null": {"rope_parameters": ABSENT, "rope_theta": None},
    "no theta in parameters": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 30.0},
    "theta of null in parameters": {"rope_parameters": {"rope_theta": None}},
    "empty parameters": {"rope_parameters": {}},
    "flat parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0}},
    "a factor of type default": {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "factor": 3.0}},
    "an older name of the type": {"rope_parameters": {"type": "default", "rope_theta": 30.0}},
    "scaling of type default": {"rope_scaling": {"rope_type": "default"}, "rope_parameters": ABSENT},
    "scaling before parameters": {"rope_scaling": {"rope_type": "default", "rope_theta": 20.0}},
    "scaling of an older name": {"rope_scaling": {"type": "default", "factor": 2.0}, "rope_theta": 9.0},
    "empty scaling": {"rope_scaling": {}},
    "scaling of null": {"rope_scaling": None},
    "a partial factor": {"rope_parameters": ABSENT, "partial_rotary_factor": 0.5},
}
LINEAR = {"rope_type": "linear", "factor": 2.5}
# For T5Gemma 2, whose full layers have separate rotations.
TWO_ROPES: dict[str, Facts] = {
    "both thetas": {"rope_parameters": ABSENT, "rope_theta": 30.0, "rope_local_base_freq": 20.0},
    "one theta": {"rope_parameters": ABSENT, "rope_local_base_freq": 20.0},
    "full alone": {"rope_parameters": {"full_attention": {"rope_theta": 30.0}}},
    "sliding alone": {"rope_parameters": {"sliding_attention": {"rope_theta": 30.0}}},
    "both null": {"rope_parameters": {"full_attention": None, "sliding_attention": None}},
    "no thetas": {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_theta": 9.0},
    "linear by parameters": {"rope_parameters": {"full_attention": LINEAR}},
    "linear by an older name": {"rope_parameters": {"full_attention": {"type": "linear", "factor": 2.5}}},
    "linear by scaling": {"rope_parameters": ABSENT, "rope_scaling": LINEAR},
    "linear by scaling, and a theta": {"rope_parameters": ABSENT, "rope_scaling": LINEAR, "rope_theta": 30.0},
    "scaling beside parameters": {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}, "rope_scaling": LINEAR},
    "scaling with a theta": {"rope_scaling": {"rope_theta": 8.0, "factor": 3.0}},
    "scaling of an older type alone": {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "scaling of nothing": {"rope_parameters": {}, "rope_scaling": LINEAR},
    "a factor of type default of full layers": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "factor": 4.0}}
    },
    "a factor of null": {"rope_parameters": {"full_attention": {"rope_type": "default", "factor": None}}},
    "linear without a factor": {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
}
PATTERNS: dict[str, Facts] = {
    "no types": {"layer_types": ABSENT},
    "types of null": {"layer_types": None},
    "a pattern": {"layer_types": ABSENT, "sliding_window_pattern": 3},
    "a pattern of all full layers": {"layer_types": None, "sliding_window_pattern": 1},
    "a pattern beside types": {"sliding_window_pattern": 2},
    "a pattern of null beside types": {"sliding_window_pattern": None},
    "a pattern under the name that was written": {"layer_types": ABSENT, "_sliding_window_pattern": 3},
    "more layers than a pattern": {"layer_types": ABSENT, "num_hidden_layers": 13},
    "all layers full": {"layer_types": ["full_attention"] * 4},
    "no layer full": {"layer_types": ["sliding_attention"] * 4},
}
SPELLINGS = {"t5gemma": ROPES | PATTERNS, "t5gemma2": ROPES | TWO_ROPES | PATTERNS}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", SPELLINGS)
def test_rotations_and_windows_of_all_releases(kind: str, side: str) -> None:
    way = next(way for way in objects(kind).values() if way[:1] == (side,))
    files = {name: changed(whole(kind), way, change) for name, change in SPELLINGS[kind].items()}
    assert failures(kind, files, refused=rf"(config.json: model.)?{side}\.") == []


FEED_FORWARDS: tuple[Facts, ...] = (
    {"feed_forward_proj": ABSENT},
    {"feed_forward_proj": ABSENT, "dense_act_fn": "gelu_new", "is_gated_act": True},
    {"feed_forward_proj": "relu", "dense_act_fn": "silu", "is_gated_act": True},
    {"feed_forward_proj": "gated-silu", "dense_act_fn": "relu", "is_gated_act": None},
    {"feed_forward_proj": "gated-tanh", "dense_act_fn": "gelu_new"},
    {"feed_forward_proj": "silu", "is_gated_act": True},
    {"feed_forward_proj": "gated-gelu", "dense_act_fn": "silu"},
)


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5"])
def test_feed_forward_and_layer_counts_equal_config_class(kind: str) -> None:
    for change in FEED_FORWARDS:
        assert not check_read(kind, changed(whole(kind), (), change)), change
    for change in (
        {"num_layers": ABSENT, "num_decoder_layers": ABSENT, "num_hidden_layers": 3},
        {"num_decoder_layers": None, "num_hidden_layers": 3},
        {"num_decoder_layers": ABSENT},
    ):
        assert not check_read(kind, changed(whole(kind), (), change)), change


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5"])
def test_other_spellings_of_sizes_are_read_as_in_config_class(kind: str) -> None:
    """A file has the general name of a size instead of T5's name."""
    facts, spellings = whole(kind), CLASSES[kind][1].attribute_map
    read = {name: key for name, key in spellings.items() if key in ("d_model", "d_kv", "num_heads", "num_layers")}
    assert len(read) >= 3
    for name, key in read.items():
        spelt = {name if old == key else old: value for old, value in facts.items()}
        assert not check_read(kind, spelt) and CLASSES[kind][0].read_facts(spelt)[key] == facts[key]


def test_null_is_read_as_in_config_class() -> None:
    """The null of a soft cap, a scale or a token is not replaced by a default."""
    assert {key for key, row in t5gemma.SIDE.items() if row.null not in (REFUSED, row.default)} == {
        *("attn_logit_softcapping", "final_logit_softcapping", "rope_theta"),
        *("pad_token_id", "eos_token_id", "bos_token_id"),
    }
    facts = changed(whole("t5gemma"), ("decoder",), {"attn_logit_softcapping": ABSENT})
    side: Any = T5GemmaConfig.read_facts(facts)
    assert side["decoder"].attn_logit_softcapping == 50.0 and side["encoder"].attn_logit_softcapping == 2.0
    facts = changed(whole("t5gemma"), ("decoder",), {"final_logit_softcapping": ABSENT})
    assert T5GemmaConfig.read_facts(facts)["final_logit_softcapping"] == 30.0
    facts = changed(whole("t5"), (), {"scale_decoder_outputs": None, "tie_word_embeddings": ABSENT})
    assert T5Config.read_facts(facts)["scale_head"] is False


# Random models of transformers, whose config.json then lacks keys, has nulls, and spells keys as older releases do.

SURE = 1e-3  # with a smaller margin, other rounding may change a choice
MOST = 10  # the number of tokens of an answer


def draw(kind: str, rng: np.random.Generator) -> Facts:
    """The whole content of a config.json, of random sizes and values."""

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    eos, start = one(1, 2), one(0, 3)
    if kind in ("t5", "mt5", "umt5"):
        return {
            "model_type": kind,
            "vocab_size": one(9, 12),
            "d_model": one(8, 12, 16),
            "d_kv": one(4, 6),
            "d_ff": one(16, 20),
            "num_heads": one(1, 2, 3),
            "num_layers": one(1, 2),
            "num_decoder_layers": one(1, 2),
            "relative_attention_num_buckets": one(4, 8),
            "relative_attention_max_distance": one(12, 20),
            "dropout_rate": one(0.0, 0.1, 0.2),
            "layer_norm_epsilon": one(1e-6, 1e-2),
            "feed_forward_proj": one("relu", "gated-gelu", "gated-silu"),
            "tie_word_embeddings": one(True, False),
            "pad_token_id": one(0, 4),
            "eos_token_id": eos,
            "decoder_start_token_id": start,
        }
    heads = one((4, 2), (2, 1), (2, 2))
    sides: list[Facts] = []
    for _ in SIDES:
        depth = one(1, 2, 3)
        side: Facts = {
            "vocab_size": sides[0]["vocab_size"] if sides else one(9, 12),
            "hidden_size": sides[0]["hidden_size"] if sides and kind == "t5gemma2" else one(8, 16),
            "intermediate_size": one(16, 20),
            "num_hidden_layers": depth,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "head_dim": one(4, 6),
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "rms_norm_eps": sides[0]["rms_norm_eps"] if sides else one(1e-6, 1e-2),
            "query_pre_attn_scalar": one(2, 5),
            "sliding_window": one(2, 3, 4),
            "attn_logit_softcapping": one(2.0, 50.0, None),
            "final_logit_softcapping": one(3.0, 30.0, None),
            "pad_token_id": one(0, 4),
            "eos_token_id": eos,
            "bos_token_id": start,
        }
        every = one(1, 2, 3)
        side["layer_types"] = [t5gemma.LAYER_TYPES[(i + 1) % every == 0] for i in range(depth)]
        rope = {"rope_type": "default", "rope_theta": one(20.0, 1e4)}
        if kind == "t5gemma2":
            full = one({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}) | {
                "rope_theta": one(50.0, 1e6)
            }
            rope = {"full_attention": full, "sliding_attention": rope}
        sides.append(side | {"rope_parameters": rope})
    ids = {key: sides[1][key] for key in ("pad_token_id", "eos_token_id", "bos_token_id")}
    encoder = sides[0]
    if kind == "t5gemma2":
        encoder = {"text_config": sides[0], "eoi_token_index": one(5, 7), "vision_config": VISION}
        encoder |= {"mm_tokens_per_image": 4}
    facts = {"model_type": kind, "dropout_rate": one(0.0, 0.1), "tie_word_embeddings": True}
    return facts | ids | {"encoder": encoder, "decoder": sides[1]}


# Keys without which a model is too large for a test, and keys that must be equal on both sides.
LARGE = {"hidden_size", "num_hidden_layers", "vocab_size", "d_model"}
EQUAL = {"rms_norm_eps"}
NEEDED = {"model_type", "eos_token_id", "decoder_start_token_id", "bos_token_id"}  # by `generate`
FIXED = LARGE | EQUAL | NEEDED | {"encoder", "decoder", "text_config", "vision_config", "mm_tokens_per_image"}


def respelt(part: Facts, rng: np.random.Generator) -> None:
    """An object of config.json with some keys in the spelling of older releases."""
    for key, other in (("d_model", "hidden_size"), ("d_kv", "head_dim"), ("num_heads", "num_attention_heads")):
        if key in part and rng.random() < 0.2:
            part[other] = part.pop(key)
    if "num_layers" in part and rng.random() < 0.2:
        part["num_hidden_layers"] = part.pop("num_layers")
    if "eoi_token_index" in part and rng.random() < 0.4:
        part["eoi_token_id"] = part.pop("eoi_token_index")
    if "layer_types" in part and rng.random() < 0.4:
        del part["layer_types"]
        if rng.random() < 0.7:
            part["sliding_window_pattern"] = int(rng.integers(1, 4))
    if "rope_parameters" in part and rng.random() < 0.6:
        rope = part.pop("rope_parameters")
        if "full_attention" in rope:
            full, sliding = dict(rope["full_attention"]), rope["sliding_attention"]
            part |= {"rope_theta": full.pop("rope_theta"), "rope_local_base_freq": sliding["rope_theta"]}
            part["rope_scaling"] = full if "factor" in full else None
        else:
            part["rope_theta"] = rope["rope_theta"]
            if rng.random() < 0.5:
                part["rope_scaling"] = {"type": "default", "factor": 2.0}
    elif "rope_parameters" in part and rng.random() < 0.6:
        each = [x for x in part["rope_parameters"].values() if isinstance(x, dict)] or [part["rope_parameters"]]
        for rope in each:
            if rope.get("rope_type") == "default":
                rope |= {"factor": 3.0}
            if rng.random() < 0.5:
                rope["type"] = rope.pop("rope_type", "default")
            if rng.random() < 0.3:
                rope.pop("rope_theta")


def mutated(kind: str, facts: Facts, rng: np.random.Generator) -> Facts:
    """A config.json that transformers accepts, derived from a complete one."""
    while True:
        changed = copy.deepcopy(facts)
        for way in objects(kind).values():
            part = at(changed, way)
            respelt(part, rng)
            for key in [key for key in part if key not in FIXED]:
                chance = rng.random()
                if chance < 0.15:
                    del part[key]
                elif chance < 0.25 and key != "pad_token_id":  # transformers needs it to compute a loss
                    part[key] = None
        try:
            expected(kind, changed)
        except Exception:  # transformers has no such model
            continue
        if changed != facts:
            return changed


def randomize(model: Any, *, centered: bool, rng: np.random.Generator) -> None:
    """Sets weights for varied greedy answers; `centered`: whether norms multiply by 1 + weight."""
    for name, weight in model.named_parameters():
        if weight.ndim > 2 or "vision" in name:
            continue
        scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.2
        if "norm" in name:
            last = re.search(r"decoder\.(final_layer_)?norm", name)
            drawn = (-1.0 if last else 1.0) - centered + 0.2 * rng.standard_normal(weight.shape)
        else:
            scale = 1.5 if "embed_tokens" in name or "shared" in name else 4.0 if "relative" in name else scale
            drawn = scale * rng.standard_normal(weight.shape)
        weight.data = torch.tensor(drawn, dtype=torch.float32)


def saved(kind: str, place: Path, rng: np.random.Generator) -> None:
    """A model of transformers with random weights, and a config.json that differs from `save_pretrained`'s."""
    facts = mutated(kind, draw(kind, rng), rng)
    config = config_of(kind, facts)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    randomize(model, centered="gemma" in kind, rng=rng)
    head = model.lm_head if "gemma" not in kind else model.lm_head.out_proj
    model.tie_weights()
    # Published UMT5s have a separate head, which only transformers 5 scales: see test_umt5.py.
    if rng.random() < 0.5 and not (kind == "umt5" and facts.get("tie_word_embeddings") is False):
        head.weight = torch.nn.Parameter(torch.tensor(rng.standard_normal(head.weight.shape), dtype=torch.float32))
        model.all_tied_weights_keys = {
            key: x for key, x in model.all_tied_weights_keys.items() if not key.startswith("lm_head")
        }
    model.save_pretrained(place)
    (place / "config.json").write_text(json.dumps({**facts, "architectures": [type(model).__name__]}))
    if rng.random() < 0.5:
        (place / "generation_config.json").unlink()


def of_transformers(place: Path, model: Any) -> Any:
    """The model, loaded by transformers with all tensors; `generate` uses the ids of its config."""
    torchs, found = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        place, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(found.values()), found
    ids = {key: getattr(model, key) for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    torchs.generation_config = transformers.GenerationConfig(**ids)
    return torchs.eval()


def check_case(kind: str, seed: int, place: Path, *, decodes: bool) -> None:
    """Compares logits, losses, answers and log-probabilities of a random model, and its round trip."""
    rng = np.random.default_rng([seed, *kind.encode()])
    saved(kind, place / "there", rng)
    model, params = read_hf(place / "there")
    torchs = of_transformers(place / "there", model)
    sources = rng.integers(3, 9, (3, 7))
    real = np.arange(7) < np.asarray([[7], [4], [6]])
    targets = rng.integers(3, 9, (3, 8))
    tokens = np.concatenate([np.full((3, 1), model.decoder_start_token_id), targets[:, :-1]], axis=1)
    with torch.no_grad():
        given = {"input_ids": torch.tensor(sources), "attention_mask": torch.tensor(real).long()}
        # Otherwise T5Gemma masks tokens with the id of padding.
        given["decoder_attention_mask"] = torch.ones(tokens.shape)
        wanted = torchs(**given, decoder_input_ids=torch.tensor(tokens)).logits
        loss = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), torch.tensor(targets).flatten())
        if getattr(torchs.config, "decoder_start_token_id", None) is not None or "gemma" in kind:
            torch.testing.assert_close(torchs(**given, labels=torch.tensor(targets)).loss, loss)
    apply, causal = jax.jit(model.module().apply), np.tril(np.ones((8, 8), bool))[None]
    logits = apply({"params": params}, sources, real, tokens, causal, np.arange(8)[None])
    # A deep model with large weights amplifies rounding: transformers' own logits in two precisions show by how much.
    with torch.no_grad():
        doubled = torchs.double()(**given, decoder_input_ids=torch.tensor(tokens)).logits
    torchs.float()
    rounding = float((wanted - doubled).abs().max())
    np.testing.assert_allclose(logits, wanted.numpy(), atol=max(1e-4, 4 * rounding), rtol=0)
    total, count = cross_entropy(jnp.asarray(logits), jnp.asarray(targets), jnp.ones(targets.shape))
    assert float(total / count) == pytest.approx(float(loss), abs=1e-4)
    check_there_and_back(kind, place, model, params, torchs)
    if decodes:
        check_answers(model, params, torchs, [row[keep].tolist() for row, keep in zip(sources, real, strict=True)])


def check_there_and_back(kind: str, place: Path, model: Any, params: Any, torchs: Any) -> None:
    """Compares tensors bit by bit, and the meaning of config.json for transformers and pipejax."""
    write_hf(model, params, place / "back", None)
    there, back = (load_file(place / name / "model.safetensors") for name in ("there", "back"))
    left = {name for name in there if ".vision_tower." in name or ".multi_modal_projector." in name}
    assert there.keys() - left == back.keys() and all(np.array_equal(there[name], x) for name, x in back.items())
    again, same = read_hf(place / "back")
    one, two = (flatten_dict(x, sep="/") for x in (params, same))
    assert again == model and one.keys() == two.keys() and all(np.array_equal(one[path], two[path]) for path in one)
    written = json.loads((place / "back" / "config.json").read_text())
    (name,) = written["architectures"]
    assert getattr(transformers, name).config_class.model_type == written["model_type"]
    facts = json.loads((place / "there" / "config.json").read_text())
    told = {"tied_head": model.tied_head} | ({"scale_head": model.scale_head} if kind == "umt5" else {})  # by tensors
    assert expected(written["model_type"], written) | told == expected(kind, facts) | told


def check_answers(model: Any, params: Any, torchs: Any, sources: list[list[int]]) -> None:
    """Compares greedy answers with log-probabilities, and answers of beams."""
    config = Config(model=model, decode=DecodeConfig(max_length=MOST, scores=True), train=TrainConfig(method="none"))
    greedy = Generator(config, params, None)
    beams = Generator(
        Config(model=model, decode=DecodeConfig(max_length=MOST, beams=3), train=TrainConfig(method="none")),
        params,
        None,
    )
    how = {"max_new_tokens": MOST, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    if isinstance(model, T5Config):  # the cache has as many layers as the encoder
        how["use_cache"] = model.num_decoder_layers <= model.num_layers
    for source, one, best in zip(sources, greedy.decode(sources), beams.decode(sources), strict=True):
        with torch.no_grad():
            given = torch.tensor([source])
            how |= {"attention_mask": torch.ones_like(given)}
            found, several = torchs.generate(given, **how), torchs.generate(given, num_beams=3, **how)
        steps = torch.stack(found.logits)[:, 0]
        margins = steps.topk(2).values
        answer = found.sequences[0, 1:].tolist()
        if (margins[:, 0] - margins[:, 1]).min() > SURE:
            wanted = [token for token in answer if token != model.eos_token_id]
            chosen = steps.log_softmax(-1)[range(len(answer)), answer].tolist()
            assert one["row_ids"] == [wanted]
            np.testing.assert_allclose(one["log_probs"][0], chosen[: len(wanted)], atol=1e-4)
            assert one["log_prob"] == pytest.approx(sum(chosen), abs=1e-3)
        ids = several.sequences[0, 1:].tolist()
        ends = ids.index(model.eos_token_id) if model.eos_token_id in ids else len(ids)
        assert best["row_ids"] == [ids[:ends]]


@pytest.mark.parametrize("kind", CLASSES)
def test_random_config_computes_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    check_case(kind, 0, tmp_path, decodes=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
def test_random_configs_decode_as_transformers_does(kind: str, tmp_path: Path) -> None:
    for seed in range(1, 4):
        check_case(kind, seed, tmp_path / str(seed), decodes=True)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", CLASSES)
def test_many_random_configs_decode_as_transformers_does(kind: str, part: int, tmp_path: Path) -> None:
    for seed in range(10 * part + 10, 10 * part + 20):
        check_case(kind, seed, tmp_path / str(seed), decodes=True)
