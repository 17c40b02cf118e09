"""T5Gemma equals transformers: weights, logits, gradients, rows; and settings of its training."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict

import pipejax
from pipejax.backbones.t5gemma import T5GemmaConfig
from pipejax.backbones.umt5 import UMT5Config
from pipejax.config import Config, DataConfig
from pipejax.convert import description
from pipejax.convert.huggingface import from_hf, write_hf
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer
from pipejax.model.sharding import make_mesh, param_shardings
from pipejax.model.t5_config import architecture
from pipejax.system.errors import UserError
from support import in_transformers
from support.backbone_cases import T5GEMMA, T5GEMMA_DECODER
from support.in_transformers import check_algorithm_1, varied
from support.tiny import FEW_WORDS

TINY = T5GEMMA.model


def test_encoder_equals_torch():
    """Outputs are compared by the keys that the decoder's layers compute, with a window shorter than the source."""
    params, torchs = T5GEMMA.loaded(1)
    source, real, *_ = in_transformers.batch(TINY, 6)
    memory = TINY.module().apply({"params": params}, source, real, method="encode")
    given = {"input_ids": torch.from_numpy(source), "attention_mask": torch.from_numpy(real).long()}
    with torch.no_grad():
        encoded = torchs.model.encoder(**given).last_hidden_state
        for i, layer in enumerate(torchs.model.decoder.layers):
            expected = layer.cross_attn.k_proj(encoded).unflatten(-1, (-1, TINY.decoder.head_dim)).permute(0, 2, 3, 1)
            apart = np.where(real[:, None, None], memory.keys[i] - expected.numpy(), 0)
            assert abs(apart).max() < 1e-4 and abs(expected).max() > 0.1


SEVERAL = dataclasses.replace(
    TINY, vocab_size=12, other_eos_token_ids=(5,)
)  # like [1, 107] of the instruction-tuned models


@pytest.mark.slow
@pytest.mark.parametrize(
    "delay, literal",
    [(1, False), (2, True), *(pytest.param(*x, marks=pytest.mark.long) for x in [(3, False), (0, False)])],
)
def test_rows_with_several_end_tokens_equal_algorithm_1(delay, literal):
    torchs = T5GEMMA.make(SEVERAL)

    def model(seed):
        params = T5GEMMA.params(SEVERAL, seed)
        return params, T5GEMMA.logits(T5GEMMA.load(torchs, SEVERAL, params))

    assert check_algorithm_1(SEVERAL, model, 8, delay=delay, literal=literal) > 1


def described(**changes: Any) -> Any:
    """The config.json of a model with other values for the decoder; `...` removes a key."""
    facts: Any = json.loads(json.dumps(TINY.facts()))
    decoder = facts["decoder"] | changes
    facts["decoder"] = {key: x for key, x in decoder.items() if x is not ...}
    return facts


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"hidden_activation": "relu"}, "decoder.hidden_activation: found 'relu'; expected 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "decoder.attention_bias: found True; expected False"),
        ({"hidden_size": None}, "decoder.hidden_size: found null; expected a whole number"),
        ({"num_hidden_layers": "2"}, "decoder.num_hidden_layers: found '2'; expected a whole number"),
        ({"vocab_size": 8}, "encoder.vocab_size: found 9; expected the decoder's, 8"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "decoder.rope_parameters: found {'rope_type': 'y",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "decoder.rope_parameters: found {'type': 'linear'"),
        (
            {"rope_parameters": {"full_attention": {}}},
            "decoder.rope_parameters: found {'full_attention': {}}; expected one",
        ),
        (
            {"rope_parameters": {"rope_theta": None}},
            "decoder.rope_parameters.rope_theta: found null; expected a number",
        ),
        ({"rope_parameters": None, "rope_theta": None}, "decoder.rope_parameters.rope_theta: found null; expected a"),
        ({"layer_types": ["full_attention"]}, "decoder.layer_types: found ['full_attention']; expected 2, every n-th"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "decoder.layer_types: found ['full"),
    ],
)
def test_unsupported_config_raises_one_line(changes, line):
    with pytest.raises(UserError) as error:
        T5GemmaConfig.read_facts(described(**changes))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_older_configs_have_other_keys():
    """They have one key for the rotation, and none for the types of layers, which alternate."""
    found = T5GemmaConfig.read_facts(described(rope_parameters=..., rope_theta=500.0, layer_types=...))
    assert found["decoder"] == dataclasses.replace(TINY.decoder, rope_theta=500.0, full_rope_theta=500.0)
    everywhere = T5GemmaConfig.read_facts(described(layer_types=["sliding_attention"] * 2))["decoder"]
    assert everywhere.layer_types(2) == ["sliding_attention"] * 2


def test_unequal_groups_of_heads_are_refused():
    with pytest.raises(UserError, match=r"here: model.decoder: found 4 heads of 4 in 3 groups; expected equal groups"):
        dataclasses.replace(TINY, decoder=dataclasses.replace(T5GEMMA_DECODER, num_key_value_heads=3)).check("here")


@pytest.mark.parametrize("side, width", [("encoder", 5), ("encoder", 9), ("decoder", 7)])
def test_widths_of_heads_are_even(side, width):
    """The halves of a head are rotated together."""
    stack = getattr(TINY, side)
    found = f"{stack.num_attention_heads} heads of {width} in {stack.num_key_value_heads} groups"
    with pytest.raises(UserError, match=f"^here: model.{side}: found {found}; expected equal groups, and an even head"):
        dataclasses.replace(TINY, **{side: dataclasses.replace(stack, head_dim=width)}).check("here")
    dataclasses.replace(TINY, **{side: dataclasses.replace(stack, head_dim=width + 1)}).check("here")


# Published numbers of parameters: Gemma 2 and 3, from which a side is taken, mT5, and T5Gemma if they are exact.
GEMMA = {"2b": 2_614_341_888, "9b": 9_241_705_984, "270m": 268_098_176, "1b": 999_885_952}
MT5 = {"small": 300_176_768, "base": 582_401_280, "large": 1_229_581_312, "xl": 3_742_619_648, "xxl": 12_921_057_280}
WHOLE = {"t5gemma-s-s": 312_517_632, "t5gemma-b-b": 591_490_560, "3b": 2_851_598_336, "v1_1-xl": 2_849_757_184}
WHOLE |= {f"mt5-{size}": count for size, count in MT5.items()}
ROUGHLY = {  # in billions, as the cards and papers say; MADLAD's 7.2 are without its two tables
    "t5gemma-l-l": 1.24,
    "t5gemma-ml-ml": 2.2,
    "t5gemma-xl-xl": 3.8,
    "t5gemma-2b-2b": 5.6,
    "t5gemma-9b-2b": 12.3,
    "t5gemma-9b-9b": 20.3,
    "t5gemma-2-270m-270m": 0.37,
    "t5gemma-2-1b-1b": 1.7,
    "t5gemma-2-4b-4b": 7.1,
    "madlad-3b": 2.9,
    "madlad-7b": 7.2 + 2 * 0.256 * 2.048,
    "madlad-10b": 10.7,
    "11b": 11.3,
}


def shapes_of(model: Any) -> Any:
    """The shapes of a model's parameters, from the table for Hugging Face's files."""
    sizes = model.sizes()
    flat = {path: tuple(sizes[axis][1] for axis in axes) for path, (_, axes) in model.tensors().items()}
    return {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in flat.items()}


@pytest.mark.parametrize(
    "name", ["t5gemma-s-s", *(pytest.param(x, marks=pytest.mark.slow) for x in ("t5gemma-9b-2b", "t5gemma-2-4b-4b"))]
)
def test_the_module_of_a_size_has_the_parameters_of_its_table(name):
    model = architecture(name)
    made = flatten_dict(jax.eval_shape(model.init_params, jax.random.key(0)), sep="/")
    assert {path: x.shape for path, x in made.items()} == {path: x.shape for path, x in shapes_of(model).items()}


@pytest.mark.parametrize("name", [*WHOLE, *ROUGHLY, *(f"umt5-{size}" for size in MT5 if size != "large")])
def test_published_sizes_have_the_published_parameter_counts(name):
    model, parts = architecture(name), Counter[str]()
    model.check(name)
    for path, x in shapes_of(model).items():
        parts[path.split("/")[0]] += math.prod(x.shape)
    total = parts.total()
    first, _, size = name.partition("-")
    if first == "umt5":  # mT5's, except for some more tokens, and a bias in each layer
        layers, tables = model.num_layers + model.num_decoder_layers, 2 * (256_384 - 250_112) * model.d_model
        assert total == MT5[size] + tables + (layers - 2) * 32 * model.num_heads
    elif name in WHOLE:
        assert total == WHOLE[name]
    else:
        assert total / 1e9 == pytest.approx(ROUGHLY[name], rel=0.03)
    if name == "t5gemma-2-4b-4b":
        assert round(parts["encoder"] / 1e6) == 3209  # without the table, as Gemma 3's report has it
    elif name.startswith("t5gemma-2-"):
        assert parts["encoder"] + parts["shared"] - model.decoder.hidden_size == GEMMA[size.split("-")[1]]
        assert parts["decoder"] == parts["encoder"]  # attention to both sides is one layer
    elif (side := size.split("-")[0]) in GEMMA:
        assert parts["encoder"] == GEMMA[side]


def test_unknown_size_raises_one_line():
    with pytest.raises(UserError, match=r"found 't5gemma-c-c'; expected one of small, .*did you mean t5gemma-"):
        architecture("t5gemma-c-c")


def test_program_for_transformers_supports_only_t5_layers():
    """The program finds T5's layers by their names, and UMT5's too."""
    given = Config(model=TINY), Config(model=UMT5Config(**vars(FEW_WORDS)))
    assert [description.custom_generate(config, None) is None for config in given] == [True, False]


@pytest.mark.parametrize("name", ["t5gemma-2b-2b", "t5gemma-9b-2b", "t5gemma-2-4b-4b"])
@pytest.mark.parametrize("fsdp, tensor", [(8, 1), (1, 8), (2, 4)])
def test_eight_devices_share_every_large_parameter(name, fsdp, tensor):
    """No device has a whole parameter of more than a megabyte, and each has an eighth of all."""
    model, mesh, whole, held = architecture(name), make_mesh(1, fsdp, tensor), 0, 0
    shapes = shapes_of(model)
    for path, place in flatten_dict(param_shardings(model, unflatten_dict(shapes, sep="/"), mesh), sep="/").items():
        size, own = (4 * math.prod(shape) for shape in (shapes[path].shape, place.shard_shape(shapes[path].shape)))
        assert size <= 2**20 or own == size // 8, (path, place.spec)
        whole, held = whole + size, held + own
    assert held <= whole / 8 * 1.01


def tokenizer_that_adds(added: str, place: Path) -> Any:
    """Writes a tokenizer of transformers that puts bos and eos around a text, as `added` states."""
    ids = {word: i for i, word in enumerate(("<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "c"))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    specials = [(word, ids[word]) for word in ("<bos>", "<eos>")]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single=added, special_tokens=specials)
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    made.save_pretrained(place)
    return made


@pytest.mark.parametrize(
    "added, former",
    [
        ("<bos> $A", [2, 4, 5, 4]),
        ("<bos> $A <eos>", [2, 4, 5, 4, 1]),
        ("$A <eos>", [4, 5, 4, 1]),
        ("$A", [4, 5, 4, 1]),  # the model's eos
        ("<eos> $A <eos>", [4, 5, 4, 1]),  # it does not begin with the model's start
    ],
)
def test_sources_have_the_tokens_that_their_tokenizer_adds(added, former, tmp_path):
    """With data.special_tokens=eos they have the tokens that former versions added."""
    theirs, tokenizer = tokenizer_that_adds(added, tmp_path), Tokenizer.load(tmp_path)

    def ids(model, **data):
        config = Config(model=model, data=DataConfig(max_source=9, **data))
        return encode_example(Example("1", "a b a", ("c",)), tokenizer, config, model).source.tolist()

    started_by_eos = dataclasses.replace(TINY, decoder_start_token_id=TINY.eos_token_id)
    assert ids(TINY) == ids(started_by_eos) == theirs("a b a").input_ids
    assert ids(TINY, special_tokens="eos") == former
    assert ids(started_by_eos, special_tokens="eos") == [4, 5, 4, 1]


@pytest.mark.slow
@pytest.mark.parametrize("added", ["<bos> $A", "<eos> $A <eos>"])
def test_encoder_input_equals_transformers(added, tmp_path):
    model = dataclasses.replace(TINY, vocab_size=8)
    write_hf(model, varied(model, 6, centered=True), tmp_path / "there", None)
    theirs = tokenizer_that_adds(added, tmp_path / "there")
    from_hf(tmp_path / "there", tmp_path / "run")
    generator = pipejax.load(tmp_path / "run", overrides={"decode.max_length": 6})
    texts = ["a b a", "b c", "c"]
    ids = [theirs(text).input_ids for text in texts]
    assert [x["row_ids"] for x in generator.decode(texts)] == [x["row_ids"] for x in generator.decode(ids)]
