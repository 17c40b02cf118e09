"""The T5 equals transformers' torch T5, and the pipelined mask allows exactly the visible tokens."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import MT5Config, MT5ForConditionalGeneration, T5ForConditionalGeneration
from transformers import T5Config as HfConfig
from transformers.models.t5.modeling_t5 import T5Attention

from pipejax import grid
from pipejax.config import DecodeConfig, GridConfig, T5Config
from pipejax.convert.huggingface import read_hf
from pipejax.model import layers, precision, stack, t5
from pipejax.model.sharding import path_of
from support import oracle
from support.one_program import compiled
from support.strategies import make

SMALL = {
    "vocab_size": 90,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
OWN_HEAD = {"tie_word_embeddings": False}
KINDS = {
    "v1.0": (HfConfig, {"feed_forward_proj": "relu"}),
    "v1.1": (HfConfig, {"feed_forward_proj": "gated-gelu", **OWN_HEAD}),
    "mt5": (MT5Config, {"feed_forward_proj": "gated-gelu", **OWN_HEAD}),
    "byt5": (HfConfig, {"feed_forward_proj": "gated-gelu", "num_layers": 3, "num_decoder_layers": 1, **OWN_HEAD}),
    "wide heads": (HfConfig, {"feed_forward_proj": "relu", "d_kv": 24, "num_heads": 3}),
    "gated-silu": (HfConfig, {"feed_forward_proj": "gated-silu", **OWN_HEAD}),
}


def make_hf(kind, directory):
    """A random model with Hugging Face's initialisation, written to disk by transformers."""
    config_class, options = KINDS[kind]
    torch.manual_seed(len(kind))
    config = config_class(**{**SMALL, **options})
    model = (MT5ForConditionalGeneration if config_class is MT5Config else T5ForConditionalGeneration)(config)
    model.save_pretrained(directory)
    return type(model).from_pretrained(directory).eval()


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    model = make_hf(request.param, directory)
    config, params = read_hf(directory)
    return model, config, jax.tree.map(jnp.asarray, params)


def ragged(rng, vocab, lengths):
    ids = np.full((len(lengths), max(lengths)), 5)
    for row, n in zip(ids, lengths, strict=True):
        row[:n] = rng.integers(0, vocab, n)
    return ids, np.arange(max(lengths)) < np.asarray(lengths)[:, None]


def causal(n):
    i = jnp.arange(n)
    return (i[None, :] <= i[:, None])[None], i[None]


@pytest.mark.slow
def test_logits_equal_torch(pair):
    model, config, params = pair
    rng = np.random.default_rng(0)
    source, mask = ragged(rng, config.vocab_size, [40, 7, 150])
    target = rng.integers(0, config.vocab_size, (3, 45))
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor(source),
            attention_mask=torch.tensor(mask).long(),
            decoder_input_ids=torch.tensor(target),
        ).logits.numpy()
    found = jax.jit(t5.T5(config).apply)({"params": params}, source, mask, target, *causal(45))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_greedy_equals_generate(pair):
    model, config, params = pair
    source, mask = ragged(np.random.default_rng(1), config.vocab_size, [12, 5, 30, 1])
    strategy = make("sequential", GridConfig(), DecodeConfig(max_length=20), bos=0, eos=1)
    decoded = jax.device_get(compiled(config, strategy)(params, source, mask.sum(1)))
    for b in range(4):  # one by one, which avoids transformers' cache for uneven depths and padding
        real = torch.tensor(source[b : b + 1, : mask[b].sum()])
        expected = model.generate(
            real,
            max_new_tokens=20,
            do_sample=False,
            num_beams=1,
            use_cache=config.num_decoder_layers <= config.num_layers,
        )[0].tolist()[1:]
        expected = expected[: expected.index(1)] if 1 in expected else expected
        assert decoded.tokens[b, 0, : decoded.lengths[b, 0]].tolist() == expected


def test_buckets_equal_transformers():
    distances = np.arange(600)
    for count, longest in ((32, 128), (32, 64), (16, 40), (8, 20)):
        for bidirectional in (False, True):
            offsets = np.concatenate([-distances[::-1], distances]) if bidirectional else -distances
            expected = T5Attention._relative_position_bucket(
                torch.tensor(offsets), bidirectional, count, longest
            ).numpy()
            half = count // 2 if bidirectional else count
            found = layers.buckets(np.minimum(np.abs(offsets), longest), count=half, longest=longest)
            np.testing.assert_array_equal(found + np.where(bidirectional & (offsets > 0), half, 0), expected)


CONFIG = T5Config(
    vocab_size=11,
    d_model=16,
    d_kv=4,
    d_ff=24,
    num_heads=3,
    num_layers=1,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)
ROWS = [[4, 5, 6, 7], [8], [9, 10, 3], [2, 2]]


def layout(rows, delay):
    flat = grid.flatten(rows, delay=delay, bos=0, eos=1)
    pairs = flat.row[:, None], flat.time[:, None], flat.row[None, :], flat.time[None, :]
    return flat, grid.visible(*pairs)[None], grid.position(flat.row, flat.time)[None]


@pytest.fixture(scope="module")
def tiny():
    params = jax.tree.map(jnp.asarray, oracle.random_params(CONFIG, np.random.default_rng(3)))
    source = np.asarray([[3, 4, 5, 6, 7, 1]])
    return params, source, np.ones(source.shape, bool)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [1, 2, 3, 6])
def test_teacher_forcing_equals_the_definition(tiny, delay):
    params, source, mask = tiny
    flat, seen, position = layout(ROWS, delay)
    forced = t5.T5(CONFIG).apply({"params": params}, source, mask, flat.inputs[None], seen, position)
    exact = jax.tree.map(np.asarray, params)
    encoded = oracle.encode(exact, CONFIG, source[0].tolist())
    reference = oracle.grid_logits(exact, CONFIG, encoded, [[0, *row, 1] for row in ROWS] + [[0]], delay)
    for i, (row, time) in enumerate(zip(flat.row, flat.time, strict=True)):
        np.testing.assert_allclose(forced[0, i], reference[row][time - row * delay], atol=2e-5, rtol=2e-6)


def test_causality_by_gradient(tiny):
    """The logits of (row, time) depend on exactly the tokens up to its row and its time."""
    params, source, mask = tiny
    model, delay = t5.T5(CONFIG), 2
    flat, seen, position = layout(ROWS, delay)
    encoded = model.apply({"params": params}, source, method=lambda m, x: m.encoder(*m.embed(x), mask, True))
    # A separate table for every slot, so that the gradient distinguishes the slots.
    spread = dict(params, shared={"embedding": params["shared"]["embedding"][flat.inputs]})
    config = T5Config(**{**vars(CONFIG), "vocab_size": len(flat.inputs)})

    def summed(table, slot):
        changed = {"params": dict(spread, shared={"embedding": table})}
        hidden = t5.T5(config).apply(
            changed,
            jnp.arange(len(flat.inputs))[None],
            method=lambda m, x: m.decoder(*m.embed(x), seen, position, encoded, mask[:, None], True),
        )
        return hidden[0, slot].sum()

    gradient = jax.jit(jax.grad(summed))
    for slot in range(len(flat.inputs)):
        touched = np.abs(gradient(spread["shared"]["embedding"], slot)).sum(-1) > 0
        lower = (flat.row <= flat.row[slot]) & (flat.time <= flat.time[slot])
        np.testing.assert_array_equal(touched, lower, err_msg=f"slot {slot}")


@pytest.mark.slow
def test_padding_and_batch_do_not_change_logits(tiny):
    params, source, _ = tiny
    model, (flat, seen, position) = t5.T5(CONFIG), layout(ROWS, 1)
    alone = model.apply({"params": params}, source, np.ones(source.shape, bool), flat.inputs[None], seen, position)
    wide = np.concatenate([source, np.full((1, 10), 7)], axis=1)
    both = np.concatenate([wide, np.full_like(wide, 4)])
    mask = np.stack([np.arange(16) < 6, np.ones(16, bool)])
    batched = model.apply({"params": params}, both, mask, np.stack([flat.inputs] * 2), seen, position)
    np.testing.assert_allclose(batched[0], alone[0], atol=1e-5)


def test_parameter_paths_are_public():
    shapes = jax.eval_shape(lambda key: CONFIG.init_params(key), jax.random.key(0))
    found = {path_of(keys): x.shape for keys, x in jax.tree_util.tree_flatten_with_path(shapes)[0]}
    d, inner, f = 16, 12, 24

    def attention(path):
        return {
            f"{path}/norm/scale": (d,),
            f"{path}/query/kernel": (d, inner),
            f"{path}/key/kernel": (d, inner),
            f"{path}/value/kernel": (d, inner),
            f"{path}/output/kernel": (inner, d),
        }

    def feed_forward(path):
        return {f"{path}/norm/scale": (d,), f"{path}/wi/kernel": (d, f), f"{path}/wo/kernel": (f, d)}

    expected = {
        "shared/embedding": (11, d),
        "encoder/norm/scale": (d,),
        "decoder/norm/scale": (d,),
        "encoder/relative_bias/embedding": (8, 3),
        "decoder/relative_bias/embedding": (8, 3),
        **attention("encoder/layers_0/attention"),
        **feed_forward("encoder/layers_0/feed_forward"),
    }
    for i in range(2):
        expected |= {
            **attention(f"decoder/layers_{i}/self_attention"),
            **attention(f"decoder/layers_{i}/cross_attention"),
            **feed_forward(f"decoder/layers_{i}/feed_forward"),
        }
    assert found == expected


def test_bfloat16_computes_in_bfloat16_and_stays_close(tiny):
    params, source, mask = tiny
    flat, seen, position = layout(ROWS, 1)
    exact = t5.T5(CONFIG).apply({"params": params}, source, mask, flat.inputs[None], seen, position)
    model = t5.T5(CONFIG, dtype=jnp.bfloat16)
    low = precision.cast_params(jax.tree.map(jnp.asarray, params), jnp.bfloat16)
    memory = model.apply({"params": low}, source, mask, method="encode")
    assert {x.dtype for x in (*memory.keys, *memory.values)} == {jnp.dtype("bfloat16")}
    rough = model.apply({"params": low}, source, mask, flat.inputs[None], seen, position)
    assert rough.dtype == jnp.float32
    assert 0 < np.abs(rough - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.slow
def test_gradients_of_frequent_words_are_not_lost_in_bfloat16(tiny):
    """A sum of equal numbers in bfloat16 stops growing at 256 of them."""
    params, words = jax.tree.map(jnp.asarray, tiny[0]), np.full((1, 2048), 5)
    flat, seen, position = layout(ROWS, 1)

    def gradient(dtype):
        def total(params):
            model, mask = t5.T5(CONFIG, dtype=dtype), np.ones(words.shape, bool)
            logits = model.apply({"params": params}, words, mask, flat.inputs[None], seen, position)
            return jax.nn.logsumexp(logits, axis=-1).sum() - logits[..., 3].sum()

        return jax.jit(jax.grad(total))(params)["shared"]["embedding"]

    exact, rough = (gradient(dtype)[5] for dtype in (jnp.float32, jnp.bfloat16))
    assert np.linalg.norm(rough - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_not_rounded_to_the_compute_dtype(tied):
    config = dataclasses.replace(CONFIG, tied_head=tied)
    params = jax.tree.map(jnp.asarray, oracle.random_params(config, np.random.default_rng(1)))
    flat, seen, position = layout(ROWS, 1)
    source = np.asarray([[3, 4, 5, 1]])
    model = t5.T5(config, dtype=jnp.bfloat16)
    logits = model.apply({"params": params}, source, np.ones((1, 4), bool), flat.inputs[None], seen, position)
    assert (logits.astype(jnp.bfloat16).astype(jnp.float32) != logits).mean() > 0.9


class Pair(nn.Module):
    """A layer with two matrices of one shape and a vector."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Any, deterministic: bool) -> Any:
        one, two = (self.param(name, nn.initializers.normal(0.3), (4, 4)) for name in ("one", "two"))
        return jnp.tanh(x @ one) @ two + self.param("shift", nn.initializers.normal(1.0), (4,))


@pytest.mark.parametrize("remat", ["layers", "dots"])
def test_grouped_parameters_of_a_scan_change_nothing(remat: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)
    params = [Pair().init(jax.random.key(n), x, True)["params"] for n in range(3)]

    def total(params: Any, **options: Any) -> Any:
        layers = [Pair().bind({"params": own}) for own in params]
        scan: dict[str, Any] = {"deterministic": True, "keys": lambda: jax.random.key(0), "pin": t5.unpinned}
        return (stack.apply_layers(layers, x, **scan, **options) ** 2).sum()

    expected = jax.value_and_grad(total)(params, remat="none")
    for grouped in (True, False):
        found = jax.value_and_grad(partial(total, remat=remat, grouped=grouped))(params)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)
