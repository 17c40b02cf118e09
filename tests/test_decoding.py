"""Both strategies against Algorithm 1 in plain lists over random models: tokens, steps, truncation, batches."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import decoding
from pipejax.config import T5Config
from pipejax.decoding import TRUNCATIONS, Pipelined, Sequential, Sizes
from pipejax.system.errors import UserError
from support import oracle, scripted
from support.batches import padded, rows_of, sources
from support.one_program import compiled
from support.scripted import NoModel
from support.tiny import FEW_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")

GATED = T5Config(
    vocab_size=7,
    d_model=8,
    d_kv=3,
    d_ff=12,
    num_heads=3,
    num_layers=2,
    num_decoder_layers=1,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    feed_forward="gated-gelu",
    tied_head=False,
    scale_head=False,
)

# config, delay, time_max, sub_max, literal, batch
SETTINGS = [
    (FEW_WORDS, 1, 12, 5, False, 7),
    (FEW_WORDS, 2, 9, 4, True, 3),
    (FEW_WORDS, 3, 14, 4, False, 6),
    (FEW_WORDS, 4, 10, 3, True, 7),
    (FEW_WORDS, 1, 6, 20, False, 3),
    (GATED, 1, 14, 8, False, 7),
    (FEW_WORDS, 1, 1, 1, False, 2),
    (FEW_WORDS, 4, 3, 5, False, 3),
]
MORE_SETTINGS = [
    (FEW_WORDS, 1, 12, 5, True, 4),
    (FEW_WORDS, 2, 15, 6, False, 5),
    (FEW_WORDS, 4, 18, 6, False, 2),
    (FEW_WORDS, 3, 16, 20, True, 1),
    (FEW_WORDS, 1, 20, 2, False, 4),
    (GATED, 2, 12, 4, True, 5),
    (GATED, 3, 11, 5, False, 4),
]
MODELS = 24  # random models for each setting


@dataclasses.dataclass(frozen=True)
class Scripted(Pipelined):
    """A grid with given rows, for any answers of the model."""

    def query(self, state):
        inner, query = super().query(state.inner)
        return scripted.State(inner, state.script), query

    def advance(self, state, answers):
        age = jnp.minimum(state.inner.length, state.script.shape[2] - 1)[:, :, None]
        says = jnp.take_along_axis(state.script, age, axis=2)[:, :, 0]
        return scripted.State(super().advance(state.inner, says), state.script)

    def done(self, state):
        return super().done(state.inner)

    def result(self, state):
        return super().result(state.inner)


def decode_scripted(strategy, answers):
    """Decodes a batch whose examples write these rows."""
    script = scripted.script(answers, strategy.rows, strategy.time_max + 1, strategy.eos)
    sizes = Sizes.fit(strategy, len(answers))

    def stretch(slots, carry):
        return decode_stretch(strategy, carry or begin(strategy, script, sizes), sizes, slots)

    return jax.device_get(decoding.run(stretch, sizes).decoded)


def test_one_program_with_all_cache_sizes_decodes_like_one_for_each() -> None:
    strategy, grown = Scripted(delay=1, time_max=12, sub_max=4), set()
    sizes = Sizes.fit(strategy, 2, slots=(14, 22))

    @jax.jit
    def whole(script):
        return decoding.run_in_one_program(
            lambda slots, carry: decode_stretch(strategy, carry or begin(strategy, script, sizes), sizes, slots), sizes
        )

    for length in (1, 5, 11):
        answers = [[[2] * length, [3] * length, [4]], [[5] * length]]
        script = jnp.asarray(scripted.script(answers, strategy.rows, strategy.time_max + 1, strategy.eos))
        used: list[int] = []

        def stretch(slots, carry, script=script, used=used):
            used.append(slots)
            return decode_stretch(strategy, carry or begin(strategy, script, sizes), sizes, slots)

        expected = decoding.run(stretch, sizes).decoded
        jax.tree.map(np.testing.assert_array_equal, whole(script), expected)
        grown.add(len(used))
    assert len(sizes.slots) == 3 and grown == {1, 2, 3}


@partial(jax.jit, static_argnums=(0, 2))
def begin(strategy, script, sizes):
    return decoding.begin(strategy, NoModel(), scripted.State(strategy.init(len(script)), script), sizes)


@partial(jax.jit, static_argnums=(0, 2, 3))
def decode_stretch(strategy, carry, sizes, slots):
    return decoding.decode(strategy, NoModel(), carry, sizes=sizes, slots=slots)


def small_steps(config, strategy, batch):
    """Sets sizes of caches that these small grids exceed."""
    return compiled(config, strategy, Sizes.fit(strategy, batch, query_counts=(batch + 2,), slots=(9,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [*SETTINGS, *(pytest.param(setting, marks=pytest.mark.long) for setting in MORE_SETTINGS)],
    ids=lambda s: f"{'gated' if s[0] is GATED else 'tiny'}-" + "-".join(map(str, s[1:])),
)
def test_pipelined_equals_algorithm_1(setting):
    config, delay, time_max, sub_max, literal, batch = setting
    strategy = Pipelined(delay=delay, time_max=time_max, sub_max=sub_max, literal=literal)
    program = small_steps(config, strategy, batch)
    for seed in range(MODELS):
        rng = np.random.default_rng([seed, delay, time_max, sub_max])
        params, texts = oracle.random_params(config, rng), sources(rng, batch, config.vocab_size)
        decoded = jax.device_get(program(params, *padded(texts)))
        for b, text in enumerate(texts):
            encoded = oracle.encode(params, config, text)
            expected = oracle.algorithm1(
                oracle.grid_next_tokens(params, config, encoded, delay),
                delay=delay,
                time_max=time_max,
                sub_max=sub_max,
                stop="literal" if literal else "empty_row",
            )
            found = rows_of(decoded, b)
            assert [row for row in found if row] == expected.rows
            assert decoded.steps[b] == expected.steps
            assert TRUNCATIONS[decoded.truncated[b]] == expected.truncated


@pytest.mark.slow
def test_random_models_cover_every_case():
    """Otherwise the test above would prove little; the cases are counted for the first models by the oracle alone."""
    truncated, empty_first, uneven, gaps, rows = set(), 0, 0, 0, 0
    for config, delay, time_max, sub_max, literal, batch in SETTINGS:
        for seed in range(12):
            rng = np.random.default_rng([seed, delay, time_max, sub_max])
            params, texts = oracle.random_params(config, rng), sources(rng, batch, config.vocab_size)
            for text in texts:
                chooses = oracle.grid_next_tokens(params, config, oracle.encode(params, config, text), delay)
                limits = {"delay": delay, "time_max": time_max, "sub_max": sub_max}
                result = oracle.algorithm1(chooses, **limits, stop="literal" if literal else "empty_row")
                truncated.add((literal, result.truncated))
                empty_first += result.all_rows[0][:2] == [0, 1]
                uneven += len({len(row) for row in result.all_rows}) > 1
                gaps += result.calls < result.steps
                rows += len(result.rows)
    assert truncated >= {(False, None), (False, "time_max"), (False, "sub_max"), (True, None), (True, "time_max")}
    assert min(empty_first, uneven, gaps) > 10
    assert rows > 500


@pytest.mark.parametrize(
    "delay, time_max, sub_max",
    [
        *((2, 12, 6), (10, 50, 2), (3, 11, 9), (6, 4, 3)),
        *(pytest.param(*setting, marks=pytest.mark.slow) for setting in ((4, 24, 5), (8, 40, 4), (25, 50, 2))),
    ],
)
def test_batches_with_pauses_equal_algorithm_1(delay, time_max, sub_max):
    """An example without an open row continues at the next start, so its calls have other times than the others'.

    In the last two cases fewer rows start in time than the bound allows: all rows may end, and time runs to its bound.
    """
    strategy = Scripted(delay=delay, time_max=time_max, sub_max=sub_max)
    batches = [[[[2] * 49, [3] * 39], *[[[2] * n, [3] * 3] for n in range(1, 8)]]]
    for seed in range(40):
        rng = np.random.default_rng([seed, delay])
        lengths = [rng.integers(0, [time_max, 2 * delay][b % 2], rng.integers(1, sub_max + 2)) for b in range(8)]
        batches.append([[[2] * n for n in of_rows] for of_rows in lengths])
    for answers in batches:
        decoded = decode_scripted(strategy, answers)
        for b, rows in enumerate(answers):
            says = oracle.scripted_next_tokens(rows)
            expected = oracle.algorithm1(says, delay=delay, time_max=time_max, sub_max=sub_max, stop="empty_row")
            assert [row for row in rows_of(decoded, b) if row] == expected.rows
            assert decoded.steps[b] == expected.steps
            assert TRUNCATIONS[decoded.truncated[b]] == expected.truncated


@pytest.mark.parametrize(
    "delay, time_max, sub_max, literal",
    [
        (1, 14, 9, False),
        (2, 14, 8, True),
        *(
            pytest.param(*setting, marks=pytest.mark.slow)
            for setting in [(2, 18, 7, False), (3, 24, 8, False), (0, 5, 4, False), (1, 9, 1, False)]
        ),
    ],
)
def test_rows_that_repeat_end_an_answer_as_in_plain_lists(delay, time_max, sub_max, literal):
    """Batches have examples that repeat rows at different times; a grid has one row."""
    limits = {"delay": delay, "time_max": time_max, "sub_max": sub_max}
    strategy, plain = (Scripted(**limits, literal=literal, unique=unique) for unique in (True, False))
    earlier = later = 0
    for seed in range(30):
        rng = np.random.default_rng([seed, delay, time_max])
        few = [[2], [3], [2, 3], [3, 3, 3], [2, 3, 2, 3, 2]][: rng.integers(1, 6)]
        answers = [[few[i] for i in rng.integers(0, len(few), rng.integers(0, 12))] for _ in range(6)]
        decoded, otherwise = (decode_scripted(one, answers) for one in (strategy, plain))
        for b, rows in enumerate(answers):
            says = oracle.scripted_next_tokens(rows)
            stop = "literal" if literal else "empty_row"
            expected = oracle.algorithm1(says, **limits, stop=stop, unique=True)
            written = [row[1 : -1 if row[-1] == 1 else None] for row in expected.all_rows]
            assert rows_of(decoded, b)[: len(written)] == written and not decoded.lengths[b, len(written) :].any()
            assert decoded.steps[b] == expected.steps
            assert strategy.calls(decoded)[b] == expected.calls
            assert TRUNCATIONS[decoded.truncated[b]] == expected.truncated
            earlier += decoded.steps[b] < otherwise.steps[b]
            again = [row in written[:i] for i, row in enumerate(written)]
            later += any(again[i] and not all(again[i:]) for i in range(len(again)))
    assert earlier > 20 or literal or delay == 0 or sub_max == 1
    assert later > 10 or sub_max == 1  # repeated rows, and other rows after them


def test_rows_are_compared_only_if_they_must_be_unique():
    """Strategies without the setting, and the literal stop, in which it has no effect, compare no rows."""

    def program(strategy):
        state = strategy.init(2)
        return str(jax.make_jaxpr(strategy.advance)(state, jnp.zeros((2, strategy.rows), jnp.int32)))

    plain = Pipelined(delay=1, time_max=9, sub_max=4)
    assert "cond" in program(dataclasses.replace(plain, unique=True))
    assert "cond" not in program(plain)
    literal = dataclasses.replace(plain, literal=True)
    assert program(literal) == program(dataclasses.replace(literal, unique=True))


def test_a_cache_that_is_too_small_is_an_error():
    strategy = Scripted(delay=1, time_max=9, sub_max=2)
    carry = begin(strategy, np.full((1, 2, 10), 2, np.int32), Sizes((2,), (8,)))
    with pytest.raises(UserError, match=r"^slots: found a cache of 8 slots, which is full"):
        decoding.run(
            lambda slots, old: decode_stretch(strategy, old or carry, Sizes((2,), (8,)), slots), Sizes((2,), (8,))
        )


@pytest.mark.slow
@pytest.mark.parametrize("config", [FEW_WORDS, GATED], ids=["tied", "gated"])
def test_sequential_is_greedy_t5_and_pipelined_with_one_row(config):
    sequential = small_steps(config, Sequential(max_length=12), 4)
    one_row = small_steps(config, Pipelined(delay=3, time_max=12, sub_max=1), 4)
    endings = set()
    for seed in range(30):
        rng = np.random.default_rng([seed, 77])
        params, texts = oracle.random_params(config, rng), sources(rng, 4, config.vocab_size)
        a, b = (jax.device_get(program(params, *padded(texts))) for program in (sequential, one_row))
        for i, text in enumerate(texts):
            expected = oracle.sequential(params, config, oracle.encode(params, config, text), 12)
            assert rows_of(a, i) == rows_of(b, i) == [expected.tokens]
            assert a.steps[i] == b.steps[i] == expected.steps
            assert TRUNCATIONS[a.truncated[i]] == expected.truncated
            endings.add(expected.truncated)
    assert endings == {None, "max_length"}
