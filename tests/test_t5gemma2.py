"""T5Gemma 2 for texts equals transformers: weights, logits, gradients, rows."""

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

from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.convert.huggingface import read_hf, write_hf
from pipejax.model.t5_config import architecture
from pipejax.system.errors import UserError
from support import in_transformers
from support.backbone_cases import T5GEMMA2, T5GEMMA2_ENCODER
from support.in_transformers import VISION

TINY = T5GEMMA2.model


def test_attention_to_the_source_depends_on_row_plus_time():
    """Cells with equal sums of row and time see it alike, and others differently, if each cell sees only itself."""
    params = T5GEMMA2.params(TINY, 4)
    source, real, *_ = in_transformers.batch(TINY, 6)
    cells = [(0, 4), (1, 3), (2, 2), (4, 0), (0, 5), (3, 2)]
    position = np.asarray([[row + time for row, time in cells]])
    tokens, alone = np.full((3, len(cells)), 7), np.eye(len(cells), dtype=bool)[None]
    found = np.asarray(jax.jit(TINY.module().apply)({"params": params}, source, real, tokens, alone, position))
    # Up to rounding: the lanes of a product may be summed in other orders.
    for cell, of_the_same_sum in ((0, 1), (0, 3), (4, 5)):
        np.testing.assert_allclose(found[:, cell], found[:, of_the_same_sum], atol=1e-5)
    assert abs(found[:, 0] - found[:, 4]).max() > 1e-2


def test_rotations_of_both_kinds_of_layers_are_read():
    """They are read as transformers writes them, and from older files."""
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
    """The published config.json of 270m-270m has it on both sides; a round trip keeps the config."""
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
    """torch's .bin files have two; a separate table of the decoder is refused."""
    model = dataclasses.replace(TINY, tied_head=False)
    params = T5GEMMA2.params(model, 3)
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
    line = r"decoder\.embed_tokens\.weight: found values that differ from model\.encoder\.embed_tokens\.weight"
    with pytest.raises(UserError, match=line):
        read_hf(tmp_path)


@pytest.mark.slow
def test_transformers_reads_untied_head(tmp_path):
    """The head is separate, but the decoder's table is the encoder's, for which config.json must tie tables."""
    model = dataclasses.replace(TINY, tied_head=False)
    params = T5GEMMA2.params(model, 3)
    write_hf(model, params, tmp_path, None)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.encoder = transformers.T5Gemma2EncoderConfig(
        **config.encoder.to_dict() | {"vision_config": VISION, "mm_tokens_per_image": 4}
    )
    again = transformers.T5Gemma2ForConditionalGeneration.from_pretrained(tmp_path, config=config).eval()
    given = in_transformers.batch(model, 9)
    with torch.no_grad():
        tensors = [torch.from_numpy(x) for x in given]
        wanted = T5GEMMA2.logits(again)(*tensors[:3], tensors[3][0], tensors[4][0]).numpy()
    np.testing.assert_allclose(model.module().apply({"params": params}, *given), wanted, atol=1e-4)


def test_sides_of_unequal_width_are_refused():
    with pytest.raises(UserError, match=r"here: model.encoder.hidden_size: found 8; expected the decoder's, 16"):
        dataclasses.replace(TINY, encoder=dataclasses.replace(T5GEMMA2_ENCODER, hidden_size=8)).check("here")


def test_encoder_window_extends_to_both_sides():
    assert TINY.window("encoder") == (2, 3) and TINY.window("decoder")[0] == 5
