"""T5Gemma beside transformers: weights, logits, gradients, rows; and what trains one."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from pipejax import checkpoint, testing
from pipejax.config import Config
from pipejax.convert import description
from pipejax.convert.huggingface import from_hf, to_hf
from pipejax.model.t5_config import architecture
from pipejax.model.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.model.umt5 import UMT5Config
from pipejax.system.errors import UserError
from support import in_transformers, schemas
from support.in_transformers import (
    check_algorithm_1,
    check_beams,
    check_greedy_tokens,
    check_logits_and_gradients,
    check_schema,
    varied,
)
from support.tiny import FEW_WORDS

# All features: groups, sides of unequal widths, caps that bend, windows that answers leave.
ENCODER = GemmaStack(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    query_pre_attn_scalar=5,
    sliding_window=3,
    attn_logit_softcapping=2.0,
)
DECODER = dataclasses.replace(ENCODER, hidden_size=12, intermediate_size=20, num_key_value_heads=1, head_dim=4)
TINY = T5GemmaConfig(
    vocab_size=9,
    num_layers=2,
    num_decoder_layers=2,
    encoder=ENCODER,
    decoder=dataclasses.replace(DECODER, attn_logit_softcapping=3.0, sliding_window=4),
    final_logit_softcapping=4.0,
)
PLAIN = dataclasses.replace(TINY, encoder=dataclasses.replace(ENCODER, attn_logit_softcapping=0.0), tied_head=False)


def made(model: T5GemmaConfig) -> Any:
    """A T5Gemma of transformers."""
    facts = {key: x for key, x in model.facts().items() if key not in ("architectures", "model_type")}
    config = transformers.T5GemmaConfig(**facts)
    for part in (config, config.encoder, config.decoder):
        part._attn_implementation = "eager"  # the only one with soft caps
    return transformers.T5GemmaForConditionalGeneration(config).eval()


def loaded(torchs: Any, model: T5GemmaConfig, params: Any) -> Any:
    """The model with these weights."""
    state = in_transformers.tensors(model, params)
    if model.tied_head:
        state["lm_head.out_proj.weight"] = state["model.decoder.embed_tokens.weight"]
    torchs.load_state_dict(state)
    return torchs


def logits_of(torchs: Any) -> in_transformers.Logits:
    """See `in_transformers.Logits`: with explicit masks, of windows on positions as well, and positions."""

    def logits(source: Any, real: Any, tokens: Any, visible: Any, position: Any) -> torch.Tensor:
        window = torchs.config.decoder.sliding_window
        near = visible & (position[:, None] - position[None] < window)
        full, sliding = (torch.where(x, 0.0, -torch.inf)[None, None] for x in (visible, near))
        found: torch.Tensor = torchs(
            input_ids=source,
            attention_mask=real.long(),
            decoder_input_ids=tokens,
            decoder_attention_mask={"full_attention": full, "sliding_attention": sliding},
            decoder_position_ids=position[None],
            use_cache=False,
        ).logits
        return found

    return logits


@pytest.mark.parametrize("model", [TINY, PLAIN], ids=["tied", "untied"])
def test_logits_and_gradients_are_torchs(model):
    params = varied(model, 0, centered=True)
    torchs = loaded(made(model), model, params)
    own, names = dict(torchs.named_parameters()), model.tensors()
    print(check_logits_and_gradients(model, params, torchs, logits_of(torchs), lambda path: own[names[path][0]]))


def test_the_encoder_is_torchs():
    """Its outputs, by the keys that the decoder's layers make of them: with a window shorter than the source."""
    params = varied(TINY, 1, centered=True)
    torchs = loaded(made(TINY), TINY, params)
    source, real, *_ = in_transformers.batch(TINY, 6)
    memory = TINY.module().apply({"params": params}, source, real, method="encode")
    given = {"input_ids": torch.from_numpy(source), "attention_mask": torch.from_numpy(real).long()}
    with torch.no_grad():
        encoded = torchs.model.encoder(**given).last_hidden_state
        for i, layer in enumerate(torchs.model.decoder.layers):
            expected = layer.cross_attn.k_proj(encoded).unflatten(-1, (-1, TINY.decoder.head_dim)).permute(0, 2, 3, 1)
            apart = np.where(real[:, None, None], memory.keys[i] - expected.numpy(), 0)
            assert abs(apart).max() < 1e-4 and abs(expected).max() > 0.1


def test_greedy_tokens_of_one_row_are_generates():
    params = varied(TINY, 2, centered=True)
    torchs = loaded(made(TINY), TINY, params)
    check_greedy_tokens(TINY, params, torchs, lowest=3)


@pytest.mark.slow
def test_beams_are_generates():
    params = varied(TINY, 2, centered=True)
    check_beams(TINY, params, loaded(made(TINY), TINY, params), lowest=3)


@pytest.mark.parametrize("delay", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_schema_is_followed_as_by_algorithm_1_over_transformers(delay):
    model = dataclasses.replace(TINY, vocab_size=len(schemas.PIECES) + 3)
    params = varied(model, 5, centered=True)
    check_schema(model, params, logits_of(loaded(made(model), model, params)), delay=delay)


@pytest.mark.parametrize("model", [TINY, PLAIN], ids=["tied", "untied"])
def test_it_goes_there_and_back(model, tmp_path):
    """From `save_pretrained`, which names the class by its model_type, and bit by bit back again."""
    torchs = loaded(made(model), model, varied(model, 3, centered=True))
    torchs.save_pretrained(tmp_path / "there")
    from_hf(tmp_path / "there", tmp_path / "run")
    assert checkpoint.open_run(tmp_path / "run").config.model == model
    to_hf(tmp_path / "run", tmp_path / "back")
    there, back = (load_file(tmp_path / place / "model.safetensors") for place in ("there", "back"))
    assert there.keys() == back.keys() and all(np.array_equal(there[name], x) for name, x in back.items())
    again = transformers.T5GemmaForConditionalGeneration.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert again.config.decoder.layer_types == torchs.config.decoder.layer_types
    given = [torch.from_numpy(x) for x in in_transformers.batch(model, 9)]
    with torch.no_grad():
        logits = [logits_of(x)(*given[:3], given[3][0], given[4][0]) for x in (torchs, again)]
    assert torch.equal(*logits)


@pytest.fixture(scope="module")
def models() -> Any:
    torchs = made(TINY)

    def model(seed: int) -> tuple[Any, in_transformers.Logits]:
        params = varied(TINY, seed, centered=True)
        return params, logits_of(loaded(torchs, TINY, params))

    return model


@pytest.mark.parametrize("delay, literal", [(2, False), pytest.param(1, True, marks=pytest.mark.slow)])
def test_rows_are_those_of_algorithm_1_over_transformers(delay, literal, models):
    farthest = check_algorithm_1(TINY, models, 8, delay=delay, literal=literal)
    assert farthest > TINY.decoder.sliding_window


@pytest.mark.long
@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_many_models_write_the_rows_of_algorithm_1_over_transformers(delay, literal, models):
    check_algorithm_1(TINY, models, 25, delay=delay, literal=literal)


@pytest.mark.slow
def test_check_backbone_passes():
    assert "T5GemmaConfig: " in testing.check_backbone(dataclasses.replace(TINY, vocab_size=64))


def described(**changes: Any) -> Any:
    """Its config.json, with other values of the decoder's; `...`: without the key."""
    facts: Any = json.loads(json.dumps(TINY.facts()))
    decoder = facts["decoder"] | changes
    facts["decoder"] = {key: x for key, x in decoder.items() if x is not ...}
    return facts


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"hidden_activation": "relu"}, "decoder.hidden_activation: found 'relu'; expected 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "decoder.attention_bias: found True; expected False"),
        ({"hidden_size": ...}, "encoder, decoder: cannot be read (TypeError: "),
        ({"num_hidden_layers": "2"}, "encoder, decoder: cannot be read (TypeError: "),
        ({"vocab_size": 8}, "encoder.vocab_size: found 9; expected the decoder's"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "decoder.rope_parameters: found {'rope_type': 'y",
        ),
        ({"rope_parameters": None, "rope_scaling": {"factor": 2}}, "decoder.rope_parameters: found "),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "decoder.layer_types: found ['full"),
    ],
)
def test_what_a_config_says_otherwise_is_one_line(changes, line):
    with pytest.raises(UserError) as error:
        T5GemmaConfig.read_facts(described(**changes))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_older_configs_have_other_keys():
    """One key for the rotation, none for the types of layers, which slide in turn."""
    found = T5GemmaConfig.read_facts(described(rope_parameters=..., rope_theta=500.0, layer_types=...))
    assert found["decoder"] == dataclasses.replace(TINY.decoder, rope_theta=500.0, full_rope_theta=500.0)
    everywhere = T5GemmaConfig.read_facts(described(layer_types=["sliding_attention"] * 2))["decoder"]
    assert everywhere.layer_types(2) == ["sliding_attention"] * 2


def test_groups_are_equal():
    with pytest.raises(UserError, match=r"here: model.decoder: found 4 heads of 4 in 3 groups; expected equal groups"):
        dataclasses.replace(TINY, decoder=dataclasses.replace(DECODER, num_key_value_heads=3)).check("here")


@pytest.mark.parametrize(
    "name, millions",
    [("t5gemma-b-b", 591), ("t5gemma-2b-2b", 5597), ("t5gemma-9b-2b", 12292), ("t5gemma-2-270m-270m", 368)],
)
def test_published_sizes(name, millions):
    """Parameters, as the models' cards tell them: 0.6 B, 5.6 B, 12.3 B and 370 M."""
    model = architecture(name)
    model.check(name)
    sizes = model.sizes()
    assert round(sum(math.prod(sizes[x][1] for x in axes) for _, axes in model.tensors().values()) / 1e6) == millions


def test_an_unknown_size_is_one_line():
    with pytest.raises(UserError, match=r"found 't5gemma-c-c'; expected one of small, .*did you mean t5gemma-"):
        architecture("t5gemma-c-c")


def test_only_a_t5s_rows_are_written_by_a_program_for_transformers():
    """Which knows T5's layers by their names, UMT5's too."""
    given = Config(model=TINY), Config(model=UMT5Config(**vars(FEW_WORDS)))
    assert [description.custom_generate(config, None) is None for config in given] == [True, False]
