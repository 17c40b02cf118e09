"""UMT5 and MADLAD-400 equal transformers: weights, logits, gradients, heads and rows; training and decoding UMT5."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import pipejax
from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps.export.programs_as_files import export
from pipejax.backbones import umt5
from pipejax.backbones.umt5 import UMT5Config
from pipejax.config import Config, DecodeConfig, T5Config
from pipejax.convert.huggingface import from_hf, read_hf, write_hf
from pipejax.decoding import DecodingOptions, Pipelined
from pipejax.inference import backends
from pipejax.inference.backends import Backend, Xla, portable
from pipejax.inference.generator import Generator
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.kernels import cpu_kernel
from pipejax.kernels.backends import OwnKernel, Products
from pipejax.registry import BACKBONES
from support import oracle
from support.backbone_cases import UMT5, UMT5_SIZES, save_umt5
from support.in_transformers import config_facts, varied
from support.kernel_models import in_one_digit
from support.tiny import RUN, change, metrics

TINY = UMT5.model


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fast_decoders_support_bias_table_for_each_layer(tied, own, weights, kernel):
    """The head is scaled if it is tied, in the fast decoders as in the module."""
    model = UMT5Config(50, 32, 16, 48, 2, 3, 3, feed_forward="gated-gelu", tied_head=tied, scale_head=tied)
    params, forced = varied(model, 5), np.random.default_rng(3).integers(3, 50, (3, 4, 12)).astype(np.int32)
    sources = [[7, 3, 9, 4, 5, 1] * 4, [8, 1], [6, 6, 2, 1]]

    def scores(backend):
        programs = Programs(model, jnp.dtype("float32"), devices=jax.local_devices()[:1], backend=backend)
        programs.set_params(params)
        options = DecodingOptions(forced=forced, scores=True)
        found = programs.decode(sources, Pipelined(1, 12, 4), batch_size=3, across=1, report=Report(), options=options)
        return np.asarray(found.log_probs)

    found, wanted = scores(OwnKernel(weights, kernel) if own else Xla(weights)), scores(Backend(weights))
    near = 1e-4 if weights == "auto" else 0.5 if in_one_digit(weights, kernel) else 0.05
    assert np.abs(wanted).max() > 1 and np.abs(found - wanted).max() < near


def test_own_kernel_is_used_for_unchanged_umt5_only(kernel, monkeypatch):
    monkeypatch.setattr(cpu_kernel, "use", lambda: kernel)
    model = UMT5Config(50, 32, 16, 48, 2, 3, 3, tied_head=False, scale_head=False)
    assert type(backends.fastest(model, jnp.float32)) is OwnKernel
    assert model.head_width() == 0  # its attention does not run in blocks
    monkeypatch.setattr(umt5.UMT5DecoderLayer, "__call__", lambda *given: None)
    assert type(backends.fastest(model, jnp.float32)) is Products


def test_converted_run_names_its_class(tmp_path):
    save_umt5(UMT5.loaded(0)[1], tmp_path / "there")
    from_hf(tmp_path / "there", tmp_path / "run")
    described = json.loads((tmp_path / "run" / "config.json").read_text())["model"]
    assert described["class"] == "pipejax.backbones.umt5:UMT5Config"


def test_run_of_a_shipped_backbone_opens_without_an_import(monkeypatch):
    text = config_lib.to_json(Config(model=TINY))
    monkeypatch.delitem(config_lib.files.sys.modules, "pipejax.backbones.umt5")
    assert type(config_lib.from_json(text, where="here").model).__qualname__ == "UMT5Config"
    assert {*BACKBONES} == {
        kind for name in BACKBONES.values() for kind in config_lib.find_class(name, "model").model_types
    }


def test_other_module_is_named_in_one_line(caplog, monkeypatch):
    class Other(umt5.UMT5):
        pass

    with caplog.at_level(logging.INFO, "pipejax"):
        assert type(portable(TINY.module())) is Xla and not caplog.text
        portable(Other(TINY))
        assert "Other layer by layer" in caplog.text.replace(",", "") and "changed" not in caplog.text
        monkeypatch.setattr(umt5.UMT5Encoder, "bias", lambda *given: None)
        portable(TINY.module())
    assert "UMT5, which is modified, layer by layer" in caplog.text


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of a UMT5 on eight devices, with sharded parameters."""
    model = dataclasses.replace(TINY, vocab_size=64, d_kv=4, num_heads=4, num_layers=1)
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    few = change(RUN, grid={"time_max": 6, "sub_max": 2}, train={"shapes": 1, "evaluate_every": 6}, mesh=mesh)
    config = dataclasses.replace(few, model=model)
    return Path(pipejax.fit(config, tmp_path_factory.mktemp("umt5") / "run"))


@pytest.mark.slow
def test_umt5_trains_on_eight_devices_as_on_one(trained, tmp_path):
    one = dataclasses.replace(config_lib.load(trained / "config.json"), mesh=config_lib.MeshConfig(data=1))
    pipejax.fit(one, tmp_path / "one")
    several, alone = (metrics(place) for place in (trained, tmp_path / "one"))
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (several, alone)]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert pipejax.load(trained).decode(["red apples"])[0]["rows"] is not None


@pytest.mark.long
def test_umt5_trains_low_rank_factors_and_is_exported(trained, tmp_path):
    config = config_lib.load(trained / "config.json")
    config = dataclasses.replace(
        change(config, train={"init_from": str(trained), "lora_rank": 2, "remat": "layers"}, mesh={"data": 1}),
        model=None,
    )
    adapted = pipejax.fit(config, tmp_path / "lora")
    before, after = (flatten_dict(checkpoint.open_run(place).items["params"], sep="/") for place in (trained, adapted))
    changed = {path for path, x in before.items() if not np.allclose(after[path], x, rtol=0, atol=1e-7)}
    assert before.keys() == after.keys() and len(changed) == 2 * (4 + 3) + 2 * (
        4 + 4 + 3
    )  # of attention and feed-forward
    assert all(path.startswith(("encoder/", "decoder/")) and path.endswith("kernel") for path in changed)
    export(adapted, tmp_path / "export", strategies=["pipelined"], platforms=["cpu"], batch=1, length=16)
    assert (tmp_path / "export" / "pipelined-cpu.jax").is_file()


# MADLAD-400: a T5 v1.1 whose table has another name, and whose start token is not the pad token.


MADLAD = T5Config(
    **UMT5_SIZES
    | {"feed_forward": "gated-gelu", "tied_head": False, "scale_head": False, "pad_token_id": 1, "eos_token_id": 2}
)


def test_madlad_is_read_with_its_names_and_start_token(tmp_path):
    params = varied(MADLAD, 3)
    write_hf(MADLAD, params, tmp_path / "there", None)
    file, facts = tmp_path / "there" / "model.safetensors", tmp_path / "there" / "config.json"
    tensors = load_file(file)
    tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    written = json.loads(facts.read_text())
    del written["scale_decoder_outputs"]  # a key that its file lacks
    facts.write_text(json.dumps(written))
    found, back = read_hf(tmp_path / "there")
    assert found == MADLAD and type(portable(found.module())) is Xla  # the stock T5, so all fast decoders take it
    before, after = (flatten_dict(x, sep="/") for x in (params, back))
    assert before.keys() == after.keys() and all(np.array_equal(before[path], x) for path, x in after.items())
    encoded = oracle.encode(params, MADLAD, [5, 6, 7, 2])
    expected = oracle.sequential(params, MADLAD, encoded, 12)
    generator = Generator(Config(model=found, decode=DecodeConfig(max_length=12)), back, None)
    (record,) = generator.decode([[5, 6, 7, 2]], method="sequential")
    assert record["row_ids"] == [expected.tokens] and expected.tokens


# The head: the table or separate, scaled or not. `tie_word_embeddings` of config.json, `...`: without the key.

HEADS: dict[str, tuple[str, Any, tuple[bool, bool]]] = {  # with the fields tied_head and scale_head
    "as transformers saves and fine-tunes one": ("none", True, (True, True)),
    "without the key": ("none", ..., (True, True)),
    "null": ("none", None, (True, True)),
    "of a published config, without its tensor": ("none", False, (True, True)),
    "a copy in the file": ("copy", True, (True, True)),
    "published": ("own", False, (False, False)),
    "a published one that transformers 5 saved": ("own", True, (False, True)),
    "its own without the key": ("own", ..., (False, True)),
    "published, with a copy": ("copy", False, (False, False)),
}


def with_head(place: Path, head: str, tied: Any) -> Path:
    """A directory of a UMT5 that transformers wrote."""
    torch.manual_seed(1)
    facts = config_facts(TINY)
    model = transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**facts))
    model.save_pretrained(place)
    tensors, file = load_file(place / "model.safetensors"), place / "config.json"
    if head != "none":
        drawn = np.random.default_rng(2).standard_normal(tensors["shared.weight"].shape).astype(np.float32)
        tensors["lm_head.weight"] = drawn if head == "own" else tensors["shared.weight"].copy()
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    written = json.loads(file.read_text()) | {"tie_word_embeddings": tied}
    file.write_text(json.dumps({key: x for key, x in written.items() if x is not ...}))
    return place


def torch_logits(place: Path, tokens: list[list[int]]) -> np.ndarray:
    model = transformers.UMT5ForConditionalGeneration.from_pretrained(place).eval()
    with torch.no_grad():
        found = model(input_ids=torch.tensor([[5, 6, 7, 1]]), decoder_input_ids=torch.tensor(tokens)).logits
    return np.asarray(found)


def own_logits(model: UMT5Config, params: Any, tokens: list[list[int]]) -> np.ndarray:
    size = len(tokens[0])
    given = np.asarray([[5, 6, 7, 1]]), np.ones((1, 4), bool), np.asarray(tokens)
    causal, position = np.tril(np.ones((1, size, size), bool)), np.arange(size)[None]
    return np.asarray(model.module().apply({"params": params}, *given, causal, position))


@pytest.mark.parametrize("case", HEADS)
def test_head_scaling_follows_config_and_tensors(case: str, tmp_path: Path, capsys: Any) -> None:
    """transformers 5 scales all heads, but T5X and transformers 4 do not scale the published head."""
    head, tied, fields = HEADS[case]
    there, tokens = with_head(tmp_path / "there", head, tied), [[0, 3, 4, 8]]
    model, params = read_hf(there)
    assert isinstance(model, UMT5Config)
    assert (model.tied_head, model.scale_head) == fields == ("lm_head" not in params, model.scale_head)
    said, wanted = capsys.readouterr().err, torch_logits(there, tokens)
    assert ("lm_head.weight: not scaled, as in T5X and transformers 4" in said) == (not model.scale_head)
    assert ("lm_head.weight: scaled, as by transformers 5" in said) == (fields == (False, True))
    factor = 1 if model.scale_head else TINY.d_model**0.5
    np.testing.assert_allclose(own_logits(model, params, tokens), wanted * factor, atol=1e-4)
    write_hf(model, params, tmp_path / "back", None)
    assert ("lm_head.weight: not scaled" in capsys.readouterr().err) == (not model.scale_head)
    assert np.array_equal(torch_logits(tmp_path / "back", tokens), wanted)
    again, same = read_hf(tmp_path / "back")
    one, two = (flatten_dict(x, sep="/") for x in (params, same))
    assert again == model and one.keys() == two.keys() and all(np.array_equal(one[path], two[path]) for path in one)


def test_unscaled_tied_head_is_written_as_separate_tensor(tmp_path: Path) -> None:
    """No config.json can declare such a table, and transformers would scale it."""
    model = dataclasses.replace(TINY, tied_head=True)
    params, tokens = varied(model, 2), [[0, 3, 4, 8]]
    write_hf(model, params, tmp_path, None)
    again, same = read_hf(tmp_path)
    assert isinstance(again, UMT5Config)
    assert (again.tied_head, again.scale_head) == (False, False) and "lm_head" not in params
    assert np.array_equal(own_logits(again, same, tokens), own_logits(model, params, tokens))
