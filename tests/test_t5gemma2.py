"""T5Gemma 2, text alone, beside transformers: weights, logits, gradients, rows."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from pipejax import checkpoint, testing
from pipejax.backbones.t5gemma import GemmaStack
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.convert.huggingface import from_hf, read_hf, to_hf, write_hf
from pipejax.model.t5_config import architecture
from pipejax.system.errors import UserError
from support import in_transformers, schemas
from support.in_transformers import (
    VISION,
    check_algorithm_1,
    check_beams,
    check_dropout,
    check_greedy_tokens,
    check_logits_and_gradients,
    check_schema,
    varied,
)

# All features: groups, windows that answers leave, rotations of two kinds, a token with a vector of its own.
ENCODER = GemmaStack(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    query_pre_attn_scalar=2,
    sliding_window=4,
    full_every=3,
    attn_logit_softcapping=0.0,
    rope_theta=20.0,
    full_rope_theta=50.0,
    full_rope_factor=1.5,
)
TINY = T5Gemma2Config(
    vocab_size=9,
    num_layers=3,
    num_decoder_layers=3,
    encoder=ENCODER,
    decoder=dataclasses.replace(ENCODER, intermediate_size=20, num_key_value_heads=1, head_dim=4, sliding_window=5),
    final_logit_softcapping=4.0,
    rms_norm_eps=0.1,
    eoi_token_index=5,
)


def made(model: T5Gemma2Config) -> Any:
    """A T5Gemma 2 of transformers, with a small vision tower."""
    facts: dict[str, Any] = {k: x for k, x in model.facts().items() if k not in ("architectures", "model_type")}
    facts["encoder"] |= {"vision_config": VISION, "mm_tokens_per_image": 4}
    config = transformers.T5Gemma2Config(**facts)
    return transformers.T5Gemma2ForConditionalGeneration(config).eval()


def name_in_module(name: str) -> str:
    """Of a tensor, by its name in files."""
    return name.replace("model.encoder.", "model.encoder.text_model.")


def loaded(torchs: Any, model: T5Gemma2Config, params: Any) -> Any:
    """The model with these weights; its tower keeps its own."""
    state = {name_in_module(name): x for name, x in in_transformers.tensors(model, params).items()}
    found = torchs.load_state_dict(state, strict=False)
    tied = ("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight", "model.decoder.embed_tokens.eoi_embedding")
    assert not found.unexpected_keys
    assert all(name in tied or ".vision_tower." in name or "multi_modal" in name for name in found.missing_keys)
    return torchs


def logits_of(torchs: Any) -> in_transformers.Logits:
    """See `in_transformers.Logits`: with explicit masks, of windows on positions as well, and positions."""

    def logits(source: Any, real: Any, tokens: Any, visible: Any, position: Any) -> torch.Tensor:
        window = torchs.config.decoder.sliding_window
        near = visible & (position[:, None] - position[None] < window)
        # SDPA joins them with the source's mask, which is one of booleans.
        full, sliding = (x[None, None].expand(len(tokens), -1, -1, -1) for x in (visible, near))
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


def params_of(seed: int, model: T5Gemma2Config = TINY) -> Any:
    params = varied(model, seed, centered=True)
    params["shared"]["eoi_embedding"] = np.random.default_rng(seed).standard_normal(16).astype(np.float32) * 4
    return params


def test_logits_and_gradients_equal_torch():
    params = params_of(0)
    torchs = loaded(made(TINY), TINY, params)
    own, names = dict(torchs.named_parameters()), TINY.tensors()
    table = lambda path: own[name_in_module(names[path][0])]  # noqa: E731
    print(check_logits_and_gradients(TINY, params, torchs, logits_of(torchs), table))


def test_dropout_is_where_torch_has_it():
    params = params_of(0)
    torchs = loaded(made(TINY), TINY, params)
    check_dropout(TINY, params, torchs, logits_of(torchs))


def test_greedy_tokens_of_one_row_equal_generate():
    params = params_of(2)
    torchs = loaded(made(TINY), TINY, params)
    check_greedy_tokens(TINY, params, torchs, lowest=3)


@pytest.mark.slow
def test_beams_equal_generate():
    params = params_of(2)
    check_beams(TINY, params, loaded(made(TINY), TINY, params), lowest=3)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
def test_a_schema_is_followed_as_by_algorithm_1_over_transformers(delay):
    model = dataclasses.replace(TINY, vocab_size=len(schemas.PIECES) + 3)
    params = params_of(4, model)
    check_schema(model, params, logits_of(loaded(made(model), model, params)), delay=delay)


def test_conversion_round_trips(tmp_path, capsys):
    """From `save_pretrained`, which names the class by its model_type, and bit by bit back again, but for the tower."""
    torchs = loaded(made(TINY), TINY, params_of(3))
    torchs.save_pretrained(tmp_path / "there")
    from_hf(tmp_path / "there", tmp_path / "run")
    assert "tensors of the vision tower: sources are text only" in capsys.readouterr().err
    assert checkpoint.open_run(tmp_path / "run").config.model == TINY
    to_hf(tmp_path / "run", tmp_path / "back")
    there, back = (load_file(tmp_path / place / "model.safetensors") for place in ("there", "back"))
    left = {name for name in there if ".vision_tower." in name or ".multi_modal_projector." in name}
    assert there.keys() - left == back.keys() and all(np.array_equal(there[name], x) for name, x in back.items())
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    config.encoder.vision_config, config.encoder.mm_tokens_per_image = torchs.config.encoder.vision_config, 4
    again = transformers.T5Gemma2ForConditionalGeneration.from_pretrained(tmp_path / "back", config=config)
    given = [torch.from_numpy(x) for x in in_transformers.batch(TINY, 9)]
    with torch.no_grad():
        logits = [logits_of(x)(*given[:3], given[3][0], given[4][0]) for x in (torchs, again)]
    assert torch.equal(*logits)


def test_the_source_is_seen_by_row_plus_time_alone():
    """Cells of one sum see it alike, and one of another sum otherwise, though each sees no slot but itself."""
    params = params_of(4)
    source, real, *_ = in_transformers.batch(TINY, 6)
    cells = [(0, 4), (1, 3), (2, 2), (4, 0), (0, 5), (3, 2)]
    position = np.asarray([[row + time for row, time in cells]])
    tokens, alone = np.full((3, len(cells)), 7), np.eye(len(cells), dtype=bool)[None]
    found = np.asarray(jax.jit(TINY.module().apply)({"params": params}, source, real, tokens, alone, position))
    # To rounding: a product's lanes may be summed in other orders.
    for cell, of_the_same_sum in ((0, 1), (0, 3), (4, 5)):
        np.testing.assert_allclose(found[:, cell], found[:, of_the_same_sum], atol=1e-5)
    assert abs(found[:, 0] - found[:, 4]).max() > 1e-2


@pytest.fixture(scope="module")
def models() -> Any:
    torchs = made(TINY)

    def model(seed: int) -> tuple[Any, in_transformers.Logits]:
        params = params_of(seed)
        return params, logits_of(loaded(torchs, TINY, params))

    return model


@pytest.mark.parametrize("delay, literal", [(2, False), pytest.param(1, True, marks=pytest.mark.slow)])
def test_rows_equal_algorithm_1_over_transformers(delay, literal, models):
    farthest = check_algorithm_1(TINY, models, 8, delay=delay, literal=literal)
    assert farthest > TINY.decoder.sliding_window


@pytest.mark.long
@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_rows_of_many_models_equal_algorithm_1_over_transformers(delay, literal, models):
    check_algorithm_1(TINY, models, 25, delay=delay, literal=literal)


@pytest.mark.slow
def test_check_backbone_passes():
    assert "T5Gemma2Config: " in testing.check_backbone(dataclasses.replace(TINY, vocab_size=64))


def test_rotations_of_both_kinds_of_layers_are_read():
    """As transformers writes them, and as older files do."""
    facts: Any = TINY.facts()
    assert T5Gemma2Config.read_facts(facts)["decoder"] == TINY.decoder
    decoder = facts["decoder"]
    del decoder["rope_parameters"]
    decoder |= {"rope_theta": 50.0, "rope_local_base_freq": 20.0}
    decoder["rope_scaling"] = {"rope_type": "linear", "factor": 1.5}
    assert T5Gemma2Config.read_facts(facts)["decoder"] == TINY.decoder
    decoder["rope_scaling"] = {"rope_type": "yarn", "factor": 1.5}
    with pytest.raises(
        UserError, match=r"decoder.rope_parameters: found .*; expected rope_type default, or full ones lin"
    ):
        T5Gemma2Config.read_facts(facts)


@pytest.mark.parametrize("size", ["270m", "1b", "4b"])
def test_published_sizes_have_rope_factor_8_in_full_layers(size):
    """As the published config.json of 270m-270m says of both sides; read again, it is the same config."""
    model = architecture(f"t5gemma-2-{size}-{size}")
    facts: Any = json.loads(json.dumps(model.facts()))
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    for side in (facts["encoder"]["text_config"], facts["decoder"]):
        sliding = {"rope_type": "default", "rope_theta": 10_000.0}
        assert side["rope_parameters"] == {"full_attention": full, "sliding_attention": sliding}
        assert side["layer_types"][:7] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert T5Gemma2Config(**T5Gemma2Config.read_facts(facts)) == model
    of_old_releases = {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    facts["decoder"] |= of_old_releases | {"layer_types": None, "sliding_window_pattern": 6}
    assert T5Gemma2Config(**T5Gemma2Config.read_facts(facts)) == model


def test_file_may_contain_two_copies_of_the_token_table(tmp_path):
    """As torch's .bin files do; a table of the decoder's own is refused."""
    model = dataclasses.replace(TINY, tied_head=False)
    params = params_of(3, model)
    write_hf(model, params, tmp_path, None)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("weight", "eoi_embedding"):
        tensors[f"model.decoder.embed_tokens.{name}"] = tensors[f"model.encoder.embed_tokens.{name}"].copy()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found, same = read_hf(tmp_path)
    one, two = (flatten_dict(x, sep="/") for x in (params, same))
    assert found == model and one.keys() == two.keys() and all(np.array_equal(one[path], two[path]) for path in one)
    tensors["model.decoder.embed_tokens.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    line = r"decoder\.embed_tokens\.weight: differs from model\.encoder\.embed_tokens\.weight; expected one table"
    with pytest.raises(UserError, match=line):
        read_hf(tmp_path)


def test_transformers_reads_untied_head(tmp_path):
    """Beside it the decoder's table is the encoder's, which takes a config.json that ties."""
    model = dataclasses.replace(TINY, tied_head=False)
    params = params_of(3, model)
    write_hf(model, params, tmp_path, None)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.encoder = transformers.T5Gemma2EncoderConfig(
        **config.encoder.to_dict() | {"vision_config": VISION, "mm_tokens_per_image": 4}
    )
    again = transformers.T5Gemma2ForConditionalGeneration.from_pretrained(tmp_path, config=config).eval()
    given = in_transformers.batch(model, 9)
    with torch.no_grad():
        tensors = [torch.from_numpy(x) for x in given]
        wanted = logits_of(again)(*tensors[:3], tensors[3][0], tensors[4][0]).numpy()
    np.testing.assert_allclose(model.module().apply({"params": params}, *given), wanted, atol=1e-4)


def test_sides_are_equally_wide():
    with pytest.raises(UserError, match=r"here: model.encoder.hidden_size: found 8; expected the decoder's, 16"):
        dataclasses.replace(TINY, encoder=dataclasses.replace(ENCODER, hidden_size=8)).check("here")


def test_the_encoders_window_is_parted_to_both_sides():
    assert TINY.window("encoder") == (2, 3) and TINY.window("decoder")[0] == 5
