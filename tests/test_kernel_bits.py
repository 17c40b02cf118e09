"""The CPU kernel gives bit-identical results for a query and a source with any other queries and sources.

With int8 a difference in the last bit can change the step of a digit, and a step can change a token. So an answer would
depend on drafts and on the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.decoding.gathering import NOWHERE, Filled, Query, gather, hide
from pipejax.kernels import cpu_kernel
from pipejax.model import t5
from pipejax.system import compile_cache
from support.kernel_models import HERE, WEIGHTS, laid_out, made

ROWS, TIMES, SLOTS, SOURCE = 3, 7, 100, 48
CELLS = [(row, time) for row in range(ROWS) for time in range(TIMES)]
BY_TIME = [[(row, time) for row in range(ROWS)] for time in range(TIMES)]


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.long if name != HERE[0] else ()) for name in HERE])
def level(request, kernel_cache, monkeypatch):
    """Each level that this processor supports."""
    monkeypatch.setenv(compile_cache.VARIABLE, str(kernel_cache))
    monkeypatch.setenv(cpu_kernel.VARIABLE, request.param)
    found = cpu_kernel.use()
    if not found:
        pytest.skip("no kernel here")
    return found


def logits(level, weights, calls, *, rejected=(), batch=1, slots=SOURCE):
    """The logits f32 [cells, V] of the last example, for queries in several calls, each a list of cells of the grid.

    Args:
      rejected: calls whose tokens are rejected and removed again.
      batch: the number of examples; all except the last one query the first cell in each call.
      slots: the slots of the memory; slots after the source are NaN.
    """
    model, own, ready, _ = made("silu", weights, level)
    c, rng = model.config, np.random.default_rng(0)
    tokens = {cell: int(rng.integers(c.vocab_size)) for cell in CELLS}
    seen = rng.standard_normal((c.num_decoder_layers, 2, c.num_heads, SOURCE, c.d_kv)).astype(np.float32)
    seen = np.pad(seen, [(0, 0)] * 3 + [(0, slots - SOURCE), (0, 0)], constant_values=np.nan)
    seen = np.broadcast_to(seen[:, :, None], (*seen.shape[:2], batch, *seen.shape[2:]))
    memory = t5.Memory(
        tuple(jnp.asarray(layer[0].swapaxes(2, 3)) for layer in seen),
        tuple(jnp.asarray(layer[1]) for layer in seen),
        jnp.asarray(np.broadcast_to(np.arange(slots) < 41, (batch, slots))),
    )

    @jax.jit
    def decode(memory):
        decoder = own.decoder(model, ready.decoding, laid_out(memory, weights))
        cache, start, found = decoder.cache(SLOTS, None), jnp.zeros(batch, jnp.int32), {}
        filled = Filled(jnp.full((batch, SLOTS), NOWHERE), jnp.zeros((batch, SLOTS), jnp.int32))
        for i, cells in enumerate(calls):
            live = np.zeros((batch, len(cells)), bool)
            live[:-1, 0], live[-1] = True, True
            row, time = (jnp.asarray([cell[j] for cell in cells], jnp.int32)[None] for j in (0, 1))
            fed = jnp.asarray([[tokens[cell] + (i in rejected) for cell in cells]] * batch, jnp.int32) % c.vocab_size
            query = Query(fed, row, time, jnp.asarray(live))
            step, number, filled = gather(query, filled, start, int(live.sum()), len(cells))
            given, cache = decoder(step, cache)
            if i in rejected:
                filled = hide(jnp.asarray(live), jnp.asarray(live), filled, start)
            else:
                found |= {cell: given[:, number[-1, j]] for j, cell in enumerate(cells)}
            start += len(cells)
        return jnp.stack([found[cell] for cell in CELLS])

    return np.asarray(decode(memory))


@pytest.mark.parametrize(
    "weights", [pytest.param(name, marks=() if name == "int8" else pytest.mark.slow) for name in WEIGHTS]
)
def test_logits_of_a_query_do_not_depend_on_other_queries(level, weights):
    by_row = [[(row, time) for time in range(TIMES)] for row in range(ROWS)]
    pairs = [[(row, time), (row, time + 1)] for time in range(0, TIMES - 1, 2) for row in range(ROWS)]
    pairs += [[(row, TIMES - 1)] for row in range(ROWS)]
    expected = logits(level, weights, [[cell] for step in BY_TIME for cell in step])
    assert np.unique(expected, axis=0).shape == expected.shape
    for calls, rejected, batch in (
        (BY_TIME, (), 1),
        (by_row, (), 1),
        ([CELLS], (), 1),
        (pairs, (), 1),
        ([BY_TIME[0], *BY_TIME], (0,), 1),
        ([*BY_TIME[:4], BY_TIME[5], *BY_TIME[4:]], (4,), 1),
        (BY_TIME, (), 3),
        ([CELLS], (), 2),
    ):
        np.testing.assert_array_equal(logits(level, weights, calls, rejected=rejected, batch=batch), expected)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_padding_of_a_source_is_not_read(level, weights):
    expected = logits(level, weights, BY_TIME)
    np.testing.assert_array_equal(logits(level, weights, BY_TIME, batch=2, slots=512), expected)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_encoding_of_a_source_does_not_depend_on_other_sources(level, weights):
    model, own, ready, _ = made("silu", weights, level)
    source, length = np.random.default_rng(1).integers(0, 48, (5, 600)), np.asarray([37, 1, 600, 33, 513], np.int32)
    encode = jax.jit(lambda ids, n: own.encode(model, ready.encoding, ids, n))
    together = encode(source, length)
    for i in range(len(length)):
        alone = encode(source[i : i + 1], length[i : i + 1])
        for one, all_of_them in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(np.asarray(one[0]), np.asarray(all_of_them[i]))
