"""Both T5Gemmas in runs: on one and eight devices, in scans, with low-rank factors, in int8, and for transformers."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict

import pipejax
from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps.serving.answer import Request
from pipejax.apps.serving.engine import Engine
from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.backbones.umt5 import UMT5Config
from pipejax.config import Config, DecodeConfig, GridConfig
from pipejax.convert.huggingface import to_hf
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source
from support import in_transformers
from support.in_transformers import varied
from support.tiny import FEW_WORDS, RUN, change, metrics, untimed

STACK = GemmaStack(16, 24, 4, 2, 4, query_pre_attn_scalar=4, sliding_window=3)
SIZES: dict[str, Any] = {"vocab_size": 64, "num_layers": 2, "num_decoder_layers": 3}
ONE = T5GemmaConfig(**SIZES, encoder=STACK, decoder=dataclasses.replace(STACK, hidden_size=12))
MERGED = dataclasses.replace(STACK, full_every=3, full_rope_theta=100.0)
TWO = T5Gemma2Config(encoder=MERGED, decoder=MERGED, **SIZES, eoi_token_index=7)
UMT5 = UMT5Config(**vars(FEW_WORDS) | {"feed_forward": "gated-gelu", "tied_head": False, "scale_head": False})
BOTH = pytest.mark.parametrize("model", [ONE, pytest.param(TWO, marks=pytest.mark.slow)], ids=["1", "2"])


def with_model(model: Any, **sections: dict[str, Any]) -> Config:
    few = change(RUN, grid={"time_max": 6, "sub_max": 2}, train={"shapes": 1, "evaluate_every": 6})
    return dataclasses.replace(change(few, **sections), model=model)


@BOTH
def test_scan_over_sliding_and_full_layers_changes_nothing(model):
    params, given = varied(model, 0, centered=True), in_transformers.batch(model, 12)
    if model is TWO:
        params["shared"]["eoi_embedding"] = np.ones(16, np.float32)
    plain, scanned = (
        jax.jit(model.module(remat=remat).apply)({"params": params}, *given) for remat in ("none", "layers")
    )
    np.testing.assert_allclose(plain, scanned, atol=1e-5)


@pytest.fixture(scope="module", params=[ONE, TWO], ids=["1", "2"])
def trained(request, tmp_path_factory) -> Path:
    """A run on eight devices, with sharded parameters."""
    config = with_model(request.param, mesh={"data": 2, "fsdp": 2, "tensor": 2})
    return Path(pipejax.fit(config, tmp_path_factory.mktemp("gemma") / "run"))


@pytest.mark.slow
def test_training_on_eight_devices_equals_one_device(trained, tmp_path):
    one = change(config_lib.load(trained / "config.json"), mesh={"data": 1, "fsdp": 1, "tensor": 1})
    pipejax.fit(one, tmp_path / "one")
    several, alone = (metrics(place) for place in (trained, tmp_path / "one"))
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (several, alone)]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert pipejax.load(trained).decode(["red apples"])[0]["rows"] is not None


@pytest.mark.slow
def test_resumed_run_equals_uninterrupted_run(trained, tmp_path):
    """The log and every number of parameters and moments are equal."""
    config = config_lib.load(trained / "config.json")
    for steps in (2, 6):
        pipejax.fit(change(config, train={"steps": steps}), tmp_path / "parts")
    whole, parts = ([line for line in untimed(metrics(x)) if "loss" in line] for x in (trained, tmp_path / "parts"))
    assert whole == parts and len(whole) == 6
    kept = [checkpoint.open_run(place).items for place in (trained, tmp_path / "parts")]
    assert jax.tree.structure(kept[0]) == jax.tree.structure(kept[1])
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, kept), strict=True))


@pytest.mark.slow
def test_only_low_rank_factors_are_trained(trained, tmp_path):
    config = config_lib.load(trained / "config.json")
    sections: dict[str, Any] = {"train": {"init_from": str(trained), "lora_rank": 2, "remat": "dots"}}
    config = change(config, **sections, mesh={"data": 1, "fsdp": 1, "tensor": 1})
    adapted = pipejax.fit(dataclasses.replace(config, model=None), tmp_path / "lora")
    before, after = (flatten_dict(checkpoint.open_run(place).items["params"], sep="/") for place in (trained, adapted))
    changed = {path for path, x in before.items() if not np.allclose(after[path], x, rtol=0, atol=1e-7)}
    kernels = {path for path in before if path.endswith("/kernel")}
    assert before.keys() == after.keys() and changed and changed <= kernels and len(changed) > 0.8 * len(kernels)
    to_hf(adapted, tmp_path / "adapter", adapter=True, base_model="owner/base")


@BOTH
@pytest.mark.slow
def test_bfloat16_and_int8_stay_close(model):
    """In int8 the table, which is head and embedding, is rounded too."""
    params = varied(model, 3, centered=True)
    if model is TWO:
        params["shared"]["eoi_embedding"] = np.ones(16, np.float32)
    source = [[5, 7, 9, 11, 13, 1]]
    found = {}
    for weights in ("auto", "int8"):
        decode = DecodeConfig(max_length=4, weights=weights, scores=True)
        config = Config(model=model, grid=GridConfig(time_max=4, sub_max=1), decode=decode)
        generator = Generator(config, params, None, backend=None)
        (found[weights],) = generator.decode(source, method="sequential")
    assert found["auto"]["log_prob"] == pytest.approx(found["int8"]["log_prob"], abs=0.5)
    assert found["auto"]["log_prob"] != found["int8"]["log_prob"]
    held = flatten_dict(generator.programs._ready.decoding, sep="/")
    assert {path for path, x in held.items() if x.dtype == jnp.int8} == {
        path for path in model.tensors() if path.endswith(("/kernel", "/embedding"))
    }
    given, half = in_transformers.batch(model, 12), model.module(dtype=jnp.bfloat16)
    exact, rounded = (jax.jit(each.apply)({"params": params}, *given) for each in (model.module(), half))
    assert abs(rounded - exact).mean() < 0.2 * abs(exact).mean()


@pytest.mark.slow
def test_export_of_a_gemma_run_has_no_custom_generate(trained, tmp_path, capsys):
    to_hf(trained, tmp_path / "there")
    assert not (tmp_path / "there" / "custom_generate").exists()
    assert "writes only the first row of an answer" in capsys.readouterr().err
    kind = transformers.AutoConfig.from_pretrained(tmp_path / "there").model_type
    assert kind == type(config_lib.load(trained / "config.json").model).model_types[0]


KINDS = ["1", "2", "umt5"]


def few_words(model: Any, seed: int) -> tuple[Any, Any]:
    """A model of nine words with parameters for varied answers."""
    few = dataclasses.replace(model, vocab_size=9)
    params = varied(few, seed, centered=model is not UMT5)
    if model is TWO:
        params["shared"]["eoi_embedding"] = np.ones(16, np.float32)
    return few, params


GRID = GridConfig(delay=2, time_max=12, sub_max=4)
NUMBERS = np.random.default_rng(7)
SOURCES = [[*NUMBERS.integers(3, 9, NUMBERS.integers(2, 9)).tolist(), 1] for _ in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("model", [ONE, *(pytest.param(x, marks=pytest.mark.long) for x in (TWO, UMT5))], ids=KINDS)
def test_drafts_streams_and_running_batches_equal_decode(model, tmp_path):
    """They equal decoding without batches; accepted tokens of a draft are in slots of any order."""
    few, params = few_words(model, 5)
    small = jax.tree.map(lambda x: x + 0.1 * x.std() * NUMBERS.standard_normal(x.shape).astype(np.float32), params)
    config = Config(model=few, grid=GRID)
    checkpoint.save_params(tmp_path / "small", config, small)
    decode = DecodeConfig(draft_tokens=3)
    generator = Generator(dataclasses.replace(config, decode=decode), params, None)
    alone = [generator.decode([source], batch_size=1)[0] for source in SOURCES]
    engine = Engine(generator, places=3, queue=100)
    answers = [engine.submit(Request(Source(i, ids), "pipelined")) for i, ids in enumerate(SOURCES)]
    engines = [[*answer.events()][-1] for answer in answers]
    engine.close(drain=True, seconds=60)
    drafted = generator.decode(SOURCES, draft="source", batch_size=4)
    by_model = dataclasses.replace(decode, draft="model", draft_checkpoint=str(tmp_path / "small"))
    by_another = Generator(dataclasses.replace(config, decode=by_model), params, None).decode(SOURCES, batch_size=4)
    streams = list[Any]()
    for source in SOURCES:
        *events, last = generator.stream_rows(source)
        for i, row in enumerate(last["row_ids"]):
            assert [event.token for event in events if event.row == i and not event.done] == row
        streams.append(last)
    # If two tokens are equally likely, rounding may decide.
    for found in (engines, drafted, by_another, streams):
        assert sum(a["row_ids"] == b["row_ids"] for a, b in zip(found, alone, strict=True)) >= 7
    for found in (drafted, by_another):
        assert sum(x["calls"] for x in found) < sum(x["calls"] for x in alone)
    assert len({str(record["row_ids"]) for record in alone}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("model", [ONE, TWO, UMT5], ids=KINDS)
def test_only_weights_are_rounded_if_held_in_bfloat16(model):
    few, params = few_words(model, 6)
    vectors = re.compile(r".*(norm/scale|relative_bias/embedding)")
    flat = flatten_dict(params, sep="/")
    rounded = {path: x if vectors.fullmatch(path) else np.float32(x.astype(jnp.bfloat16)) for path, x in flat.items()}

    def answers(params: Any, **decode: Any) -> list[Any]:
        config = Config(model=few, grid=GRID, decode=DecodeConfig(dtype="float32", scores=True, **decode))
        return Generator(config, params, None, backend=None).decode(SOURCES)  # with XLA, the default, in this dtype

    held, plain = answers(params, weights="bfloat16"), answers(unflatten_dict(rounded, sep="/"))
    assert [x["row_ids"] for x in held] == [x["row_ids"] for x in plain]
    probabilities = [[x["log_prob"] for x in found] for found in (held, plain, answers(params))]
    np.testing.assert_allclose(probabilities[0], probabilities[1], rtol=1e-4)
    assert not np.allclose(probabilities[0], probabilities[2], rtol=1e-4)
