"""The packed decoder equals the full grid for all sizes, and does not copy the cache."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import grid
from pipejax.config import T5Config
from pipejax.decoding import TRUNCATIONS, Beam, Pipelined, Sequential, Sizes
from pipejax.decoding.gathering import NOWHERE, Filled, Query, gather
from pipejax.inference import programs
from pipejax.inference.backends import XLA
from pipejax.inference.step_decoder import StepDecoder
from pipejax.model import t5
from support import full_grid, oracle
from support.one_program import compiled

CONFIG = T5Config(
    vocab_size=40,
    d_model=24,
    d_kv=8,
    d_ff=40,
    num_heads=3,
    num_layers=1,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    feed_forward="gated-gelu",
    tied_head=False,
)
ROWS = [[4, 5, 6, 7], [8], [9, 10, 3], [2, 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "delay, time_max, sub_max, literal, batch, queries, slots",
    [(1, 20, 9, False, 5, (3, 11), (4, 16, 30)), (2, 17, 20, False, 1, (2,), ()), (3, 19, 4, True, 6, (), (10,))],
)
def test_packed_decoding_is_the_full_grid(delay, time_max, sub_max, literal, batch, queries, slots):
    strategy = Pipelined(delay=delay, time_max=time_max, sub_max=sub_max, literal=literal)
    model, sizes = t5.T5(CONFIG), Sizes.fit(strategy, batch, query_counts=queries, slots=slots)
    program = compiled(CONFIG, strategy, sizes)
    rng = np.random.default_rng(delay)
    for seed in range(4):
        weights = oracle.random_params(CONFIG, np.random.default_rng([seed, delay]), eos_scale=1.2)
        params = jax.tree.map(jnp.asarray, weights)
        source = rng.integers(0, CONFIG.vocab_size, (batch, 12)).astype(np.int32)
        length = rng.integers(1, 13, batch).astype(np.int32)
        expected = full_grid.decode(model, params, strategy, source, length)
        found = jax.device_get(program(params, source, length))
        for b in range(batch):
            rows = [row[:n].tolist() for row, n in zip(found.tokens[b], found.lengths[b], strict=True)]
            assert [row for row in rows if row] == [row for row in expected["rows"][b] if row]
            assert found.steps[b] == expected["steps"][b]
            assert TRUNCATIONS[found.truncated[b]] == expected["truncated"][b]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("delay", [1, pytest.param(2, marks=pytest.mark.long), 5])
def test_cached_decoding_equals_teacher_forcing(delay, batch):
    """Logits step by step in a growing cache, forced to ROWS (rotated by example), equal those of one pass."""
    params = jax.tree.map(jnp.asarray, oracle.random_params(CONFIG, np.random.default_rng(3)))
    source = np.random.default_rng(0).integers(0, 40, (batch, 6))
    lengths = np.asarray([6, 4, 5][:batch], np.int32)
    model = t5.T5(CONFIG)
    ready = XLA.prepare(model, params)
    decoder = StepDecoder(
        CONFIG, ready.decoding, programs.encode_batch(model, ready.encoding, source, lengths), jnp.float32
    )
    all_rows = [[*ROWS[b:], *ROWS[:b]] for b in range(batch)]
    forced, at = [], []
    for b, rows in enumerate(all_rows):
        flat = grid.flatten(rows, delay=delay, bos=0, eos=1)
        pairs = flat.row[:, None], flat.time[:, None], flat.row[None, :], flat.time[None, :]
        seen, position = grid.visible(*pairs)[None], grid.position(flat.row, flat.time)[None]
        mask = (np.arange(6) < lengths[b])[None]
        forced.append(model.apply({"params": params}, source[b : b + 1], mask, flat.inputs[None], seen, position)[0])
        at.append({(int(r), int(t)): i for i, (r, t) in enumerate(zip(flat.row, flat.time, strict=True))})

    strategy = Pipelined(delay=delay, time_max=30, sub_max=6)
    state, compared, calls, used = strategy.init(batch), 0, 0, 0
    width, queries = 6, 6 * batch
    cache, filled = decoder.cache(16, None), Filled(jnp.full((batch, 16), NOWHERE), jnp.full((batch, 16), NOWHERE))
    gathered = jax.jit(lambda query, filled, used: gather(query, filled, used, queries, width))
    ask = jax.jit(decoder.__call__)
    while not bool(strategy.done(state).all()):
        state, query = strategy.query(state)
        if used + width > filled.row.shape[1]:
            filled = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 16)), constant_values=NOWHERE), filled)
            cache = decoder.cache(filled.row.shape[1], cache)
        step, number, filled = gathered(query, filled, jnp.asarray([used]))
        logits, cache = ask(step, cache)
        used, calls = used + int(query.live.sum(axis=1).max()), calls + 1
        assert query.live.any()
        answers = np.ones((batch, 6), np.int32)
        for b, rows in enumerate(all_rows):
            if state.done[b]:
                continue
            now = int(query.time[b][query.live[b]].max())
            for row, tokens in enumerate([*rows, []]):
                position = now - row * delay
                if 0 <= position <= len(tokens):
                    assert query.live[b, row]
                    np.testing.assert_allclose(logits[:, number[b, row]], forced[b][at[b][row, now]], atol=1e-5)
                    answers[b, row] = [*tokens, 1][position]
                    compared += 1
        state = strategy.advance(state, jnp.asarray(answers))
    assert compared == batch * (sum(len(row) + 1 for row in ROWS) + 1)
    assert filled.row.shape[1] > 16  # the cache has grown
    script = oracle.scripted_next_tokens(ROWS)
    expected = oracle.algorithm1(script, delay=delay, time_max=30, sub_max=6, stop="empty_row")
    if batch == 1:
        assert (int(strategy.result(state).steps[0]), calls) == (expected.steps, expected.calls)


def back(step):
    """The distance of each slot back from each query."""
    return step.position[:, :, None] - step.key_position[:, None]


def test_pack_puts_each_live_query_in_one_place():
    live = np.asarray([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], bool)
    tokens = np.arange(10, 22).reshape(3, 4)
    query = Query(tokens=tokens, row=np.arange(4)[None], time=np.full((3, 4), 7), live=live)
    before = Filled(
        np.pad([[0, 2], [0, 1], [1, NOWHERE]], ((0, 0), (0, 8)), constant_values=NOWHERE), np.full((3, 10), 6)
    )
    step, number, filled = jax.jit(gather, static_argnums=(3, 4))(query, before, np.asarray([4]), 5, 3)
    assert step.tokens[:4].tolist() == [10, 12, 13, 19]
    assert [number[0, 0], number[0, 2], number[0, 3], number[2, 1]] == [0, 1, 2, 3]
    assert step.query_at_place.tolist() == [[0, 1, 2], [5, 5, 5], [3, 5, 5]]
    assert step.place_of_query.tolist() == [0, 1, 2, 6, 9]
    assert filled.row.tolist() == [
        [0, 2, NOWHERE, NOWHERE, 0, 2, 3] + [NOWHERE] * 3,
        [0, 1] + [NOWHERE] * 8,
        [1] + [NOWHERE] * 3 + [1] + [NOWHERE] * 5,
    ]
    # Example 0: rows 0, 2 and 3 have queries; keys are the earlier keys of rows 0 and 2, then their own.
    assert step.mask[0, :, :7].astype(int).tolist() == [
        [1, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 1, 1, 1],
    ]
    assert step.mask[2, 0].nonzero()[0].tolist() == [0, 4]
    assert back(step)[0, 1, [0, 1, 4, 5]].tolist() == [3, 1, 2, 0]


def test_query_with_a_lineage_sees_its_lineage():
    """Time 0 was fed in row 0, time 1 in rows 0 and 1, time 2 in rows 0 and 2 just now; rows are in any order."""
    live = np.asarray([[1, 0, 1], [0, 0, 0]], bool)
    lineage = np.asarray([[[0, 1, 0, 0], [9, 9, 9, 9], [0, 0, 2, 0]], np.zeros((3, 4))], np.int32)
    query = Query(
        tokens=np.full((2, 3), 5),
        row=np.arange(3)[None],
        time=np.full((1, 3), 2),
        live=live,
        lineage=lineage,
    )
    nothing = [NOWHERE] * 4
    before = Filled(*(np.asarray([[*first, *nothing, 9]] * 2) for first in ([1, 0, 0], [1, 0, 1])))
    step, _, filled = jax.jit(gather, static_argnums=(3, 4))(query, before, np.asarray([4]), 4, 2)
    assert filled.row[0].tolist() == [1, 0, 0, NOWHERE, 0, 2, NOWHERE, 9]
    assert step.mask[0].astype(int).tolist() == [[1, 1, 0, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 1, 0, 0]]
    assert back(step)[0, :, [0, 1, 2, 4, 5]].T.tolist() == [[1, 2, 1, 0, 0]] * 2


def test_schedule_holds_every_decode():
    strategy = Pipelined(delay=2, time_max=9, sub_max=20)
    # For each call: the rows that have begun, or one more if an example was at a pause.
    assert (strategy.most_queries, strategy.slots) == (5, 1 + 2 * (2 + 3 + 4 + 5))
    assert Pipelined(delay=1, time_max=4, sub_max=3).slots == 1 + 2 + 3 + 3
    sizes = Sizes.fit(strategy, 3, query_counts=(4, 8, 40), slots=(3, 12, 64))
    assert sizes.query_counts == (4, 8, 15)
    assert sizes.slots == (12, 29 + 5)
    assert Sizes.fit(Sequential(max_length=7), 1, query_counts=(4, 8), slots=(128,)) == Sizes((1,), (8,))
    assert (Beam(7, 4).most_queries, Beam(7, 4).slots) == (4, 1 + 6 * 4)
    assert Sizes.fit(strategy, 1, slots=(3, 6, 8)).slots == (6, 8, 34)
    # The smallest cache must fit only the narrowest step.
    assert Sizes.fit(strategy, 1, query_counts=(3,), slots=(2, 3, 8)).slots == (3, 8, 34)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "strategy", [Pipelined(delay=1, time_max=23, sub_max=10), Sequential(max_length=200), Beam(60, 5)]
)
@pytest.mark.parametrize("number, steps", [(0, 1), (1, 1), (1, 4)])
def test_no_step_copies_the_cache(strategy, batch, number, steps):
    """In the compiled program, no computation in a loop's body copies the cache, the memory or a weight."""
    model = t5.T5(CONFIG)
    sizes = Sizes.fit(strategy, batch, query_counts=(4 * batch,), slots=(31, 78), steps=steps)
    ready = jax.eval_shape(lambda k: XLA.prepare(model, CONFIG.init_params(k)), jax.random.key(0))
    source, length = jax.ShapeDtypeStruct((batch, 17), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    memory = jax.eval_shape(partial(programs.encode_batch, model), ready.encoding, source, length)
    carry = None
    for slots in sizes.slots[: number + 1]:
        program = jax.jit(partial(programs.decode_batch, model, strategy, sizes=sizes, slots=slots))
        arguments = (ready.decoding, None), memory, carry
        carry = jax.eval_shape(program, *arguments).carry
    text = program.lower(*arguments).compile().as_text()

    computations: dict[str, list[str]] = {}
    for line in text.splitlines():
        if head := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            inside = computations.setdefault(head[1], [])
        elif " = " in line:
            inside.append(line)
    loops = [line for lines in computations.values() for line in lines if " while(" in line]
    # An iteration of several steps is an additional loop, whose condition is not evaluated.
    assert len(loops) == (1 + (steps > 1)) * len(sizes.query_counts) + (len(sizes.query_counts) > 1)
    known = [line for line in loops if f'"known_trip_count":{{"n":"{steps}"}}' in line]
    assert len(known) == (steps > 1) * len(sizes.query_counts)
    waiting, bodies = [re.search(r"body=%?([\w.\-]+)", line)[1] for line in loops], set()
    while waiting:
        if (name := waiting.pop()) not in bodies:
            bodies.add(name)
            for line in computations[name]:
                called = r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)"
                waiting += re.findall(called, line)
    keys = [slots, 64]
    large = {f"f32[{h},{x}]" for h in (3 * batch, f"{batch},3") for k in keys for x in (f"{k},8", f"8,{k}")}
    large |= {f"f32[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(ready) if len(x.shape) == 2}
    written, copied = set(), []
    for name in bodies:
        for line in computations[name]:
            if found := re.search(r"= (\w+\[[\d,]*\])\S* ([\w\-]+)\(", line):
                copied += (
                    [line] if found[1] in large and found[2] in ("copy", "copy-start", "transpose", "select") else []
                )
                written |= {found[1]} if found[2] == "dynamic-update-slice" else set()
    assert not copied
    # The searched names are exactly the occurring names.
    assert {f"f32[{3 * batch},{slots},8]", f"f32[{3 * batch},8,{slots}]"} <= written
