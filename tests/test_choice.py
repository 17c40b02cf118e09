"""Sampling, limits and log-probabilities are compared with Hugging Face's processors, NumPy and logits."""

from statistics import NormalDist
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pipejax import grid, methods
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding import DecodingOptions, Sampling, Step, choice
from pipejax.decoding.rules import Queries
from pipejax.inference.generator import Generator
from pipejax.model import t5
from pipejax.system.errors import UserError
from support import oracle
from support.tiny import MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")


def queries_at(row, time):
    """The queries of a step, one for each example."""
    row, time = (jnp.asarray(x, jnp.int32)[:, None] for x in (row, time))
    step = Step(row[:, 0], None, None, None, None, None, row, time, None, None)
    return Queries(step, find_rows=lambda: pytest.fail("no rule reads rows"))


def sampling(count, temperature=1.0, top_k=0, top_p=1.0, seed=None, **more):
    seeds = np.arange(count) if seed is None else seed
    each = [Sampling(temperature, top_k, top_p, seed, **more) for seed in seeds]
    return jax.tree.map(jnp.asarray, Sampling.together(each))


@jax.jit
def drawn(logits, options):
    """The tokens [N] that are drawn from logits [V, N] for the first queries of N examples."""
    none = np.zeros(logits.shape[1])
    return choice.choose_tokens(choice.first_argmax, logits, queries_at(none, none), options)


def generated(logits, temperature, top_k, top_p, min_p):
    """The scores from which transformers' `generate` samples, with its warpers in its order."""
    scores = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits))
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    return MinPLogitsWarper(min_p)(None, scores) if min_p else scores


@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p",
    [
        *((1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.6, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.3, 20, 0.6, 0.0)),
        *((1.0, 0, 1.0, 0.1), (1.5, 20, 0.9, 0.05)),
    ],
)
def test_samples_have_the_distribution_of_transformers(temperature, top_k, top_p, min_p):
    """4,000 draws; the probability that a correct distribution fails is one in ten thousand."""
    count, vocabulary = 4_000, 300
    logits = (3 * np.random.default_rng(1).standard_normal(vocabulary)).astype(np.float32)
    options = DecodingOptions(sampling=sampling(count, temperature, top_k, top_p, min_p=min_p))
    found = np.bincount(drawn(np.tile(logits[:, None], (1, count)), options), minlength=vocabulary)
    scores = generated(logits[None], temperature, top_k, top_p, min_p)
    expected = count * scores.softmax(-1)[0].numpy().astype(np.float64)
    assert found[expected == 0].sum() == 0
    often = expected >= 5
    rest = np.asarray([x[(expected > 0) & ~often].sum() for x in (found, expected)])[:, None]
    observed, wanted = (np.append(x[often], r) for x, r in zip((found, expected), rest, strict=True))
    kept = wanted > 0
    fitted = wanted[kept] * observed.sum() / wanted.sum()
    distance, degrees = ((observed[kept] - fitted) ** 2 / fitted).sum(), kept.sum() - 1
    # The approximation by Wilson and Hilferty (1931): the cube root of chi squared is nearly normal.
    spread = 2 / (9 * degrees)
    assert (distance / degrees) ** (1 / 3) < 1 - spread + spread**0.5 * NormalDist().inv_cdf(1 - 1e-4)


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (7, 1.0), (0, 0.7), (12, 0.9)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_keeps_the_tokens_of_transformers(temperature, top_k, top_p, min_p):
    """40 distributions are tested with min_p alone, and after top_k and top_p, which `generate` applies first."""
    logits = (2 * np.random.default_rng(3).standard_normal((40, 200))).astype(np.float32)
    expected = np.isfinite(generated(logits, temperature, top_k, top_p, min_p).numpy())
    shifted = (logits - logits.max(axis=1, keepdims=True)) / np.float32(temperature)
    weights = choice._limit(jnp.asarray(shifted.T), sampling(40, temperature, top_k, top_p, min_p=min_p))
    np.testing.assert_array_equal(np.asarray(weights > 0).T, expected)
    if min_p == 0.5 and not top_k:  # in other cases the other limits may leave min_p without effect
        assert expected.sum() < np.isfinite(generated(logits, temperature, top_k, top_p, 0).numpy()).sum()


# The tokens drawn in test_draws_without_min_p_are_unchanged_by_others_with_it before the setting existed.
BEFORE = [13, 0, 24, 29, 28, 9, 30, 29, 8, 11, 10, 43, 47, 48, 19, 47]


def test_min_p_alone_limits_draws():
    """Two of four tokens have at least half of the highest probability."""
    logits = jnp.log(jnp.asarray([0.4, 0.3, 0.19, 0.11]))
    count = 400
    options = DecodingOptions(sampling=sampling(count, min_p=0.5))
    wide = jnp.broadcast_to(logits[:, None], (4, count))
    drawn = choice.choose_tokens(choice.first_argmax, wide, queries_at(np.zeros(count), np.zeros(count)), options)
    assert {*drawn.tolist()} == {0, 1}


def test_draws_without_min_p_are_unchanged_by_others_with_it():
    """They are equal in one batch, and equal the tokens that were drawn before the setting existed."""
    rng = np.random.default_rng(6)
    logits = jnp.asarray((2 * rng.standard_normal((50, 16))).astype(np.float32))
    settings = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.6, 20, 0.6)]
    each = [Sampling(*settings[i % 4], seed=i) for i in range(16)]

    def draw(each):
        options = DecodingOptions(sampling=jax.tree.map(jnp.asarray, Sampling.together(each)))
        queries = queries_at(np.arange(16), np.arange(16))
        return choice.choose_tokens(choice.first_argmax, logits, queries, options).tolist()

    assert draw(each) == BEFORE
    mixed = [one.replace(min_p=0.9) if i % 2 else one for i, one in enumerate(each)]
    assert draw(mixed)[::2] == BEFORE[::2]


def test_equal_logits_at_the_limit_stay_together():
    logits = jnp.asarray([[0.0], [2.0], [1.0], [1.0], [-1.0]])
    weights = choice._limit(logits, sampling(1, top_k=2))
    assert (weights[:, 0] > 0).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("share, token", [(0.0, 1), (0.249, 1), (0.26, 3), (0.999999, 600)])
def test_share_of_the_sum_selects_its_token(share, token):
    """A token without weight is never selected, with any rounding."""
    weights = jnp.zeros(700).at[jnp.asarray([1, 3, 600])].set(jnp.asarray([1.0, 2.0, 1.0]))
    assert choice._find(weights[:, None], jnp.asarray([share])).tolist() == [token]
    assert choice._find(weights[:, None] * 1e-30, jnp.asarray([share])).tolist() == [token]


def test_draw_depends_only_on_seed_and_place():
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((50, 6)), jnp.float32)[:, :1].repeat(6, axis=1)
    row, time, seed = [0, 1, 0, 0, 1, 1], [0, 0, 1, 0, 0, 0], [7, 7, 7, 7, 7, 8]

    def drawn(places):
        options = DecodingOptions(sampling=sampling(len(places), 5.0, seed=np.asarray(seed)[places]))
        queries = queries_at(np.asarray(row)[places], np.asarray(time)[places])
        return choice.choose_tokens(choice.first_argmax, logits[:, places], queries, options).tolist()

    found = drawn(list(range(6)))
    assert found[0] == found[3] and found[1] == found[4] and len({*found}) > 2
    assert drawn([2, 5]) == [found[2], found[5]]


GRID = GridConfig(delay=2, time_max=12, sub_max=4)
TEXTS = [[3, 5, 7, 4, 1], [9, 8, 1], [2, 3, 4, 5, 6, 7, 8, 9, 1]]


def generator(strategy="pipelined", params=None, **decode):
    config = Config(
        model=MORE_WORDS, grid=GRID, train=TrainConfig(method=strategy), decode=DecodeConfig(max_length=14, **decode)
    )
    return Generator(config, params or oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)


@pytest.mark.parametrize(
    "strategy, draft",
    [
        pytest.param("pipelined", "none", marks=pytest.mark.slow),
        pytest.param("sequential", "none", marks=pytest.mark.slow),
        pytest.param("pipelined", "source", marks=pytest.mark.long),
        pytest.param("sequential", "source", marks=pytest.mark.long),
    ],
)
def test_log_probabilities_equal_the_models(strategy, draft):
    """Greedy and drawn tokens are compared with one pass over the answer; drafts change neither tokens nor scores."""
    made = generator(strategy, temperature=1.5, scores=True, draft=draft, seed=3)
    records = made.decode(TEXTS)
    model, params = t5.T5(MORE_WORDS), oracle.random_params(MORE_WORDS, np.random.default_rng(4))
    if draft != "none":
        plain = generator(strategy, temperature=1.5, scores=True, seed=3).decode(TEXTS)
        assert [record["row_ids"] for record in records] == [record["row_ids"] for record in plain]
    for text, record in zip(TEXTS, records, strict=True):
        rows, delay = record["row_ids"], GRID.delay if strategy == "pipelined" else 1
        final = strategy == "pipelined" and len(rows) < GRID.sub_max and record["truncated"] is None
        flat = grid.flatten(rows, delay=delay, bos=0, eos=1, final=final)
        pairs = flat.row[:, None], flat.time[:, None], flat.row[None, :], flat.time[None, :]
        seen, position = grid.visible(*pairs)[None], grid.position(flat.row, flat.time)[None]
        mask = np.ones((1, len(text)), bool)
        logits = model.apply({"params": params}, np.asarray([text]), mask, flat.inputs[None], seen, position)[0]
        wanted = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(flat.targets)), flat.targets]
        at = {(r, t): p for r, t, p, w in zip(flat.row, flat.time, wanted, flat.weights, strict=True) if w}
        for i, found in enumerate(record["log_probs"]):
            expected = [at[i, i * delay + j] for j in range(len(found))]
            np.testing.assert_allclose(found, expected, atol=1e-4)
            assert len(found) == len(rows[i])
        if record["truncated"] is None:
            assert record["log_prob"] == pytest.approx(sum(at.values()), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipelined", "sequential"])
def test_drafts_do_not_change_samples_with_min_p(strategy):
    """A drafted token is accepted if it equals the sample; without min_p other tokens are drawn."""
    settings = {"temperature": 1.5, "seed": 3, "min_p": 0.2}
    drafted, plain, wider = (
        [record["row_ids"] for record in generator(strategy, **settings | more).decode(TEXTS)]
        for more in ({"draft": "source"}, {}, {"min_p": 0.0})
    )
    assert drafted == plain != wider


@pytest.mark.slow
def test_samples_do_not_depend_on_the_batch():
    made = generator(temperature=1.0, samples=3, seed=1)
    records = made.decode(TEXTS)
    assert [(record["id"], record["sample"]) for record in records] == [(i, k) for i in range(3) for k in range(3)]
    assert len({str(record["row_ids"]) for record in records[:3]}) > 1
    alone = made.decode(TEXTS, batch_size=1)
    assert [record["row_ids"] for record in alone] == [record["row_ids"] for record in records]
    assert made.decode(TEXTS) == records
    other = generator(temperature=1.0, samples=3, seed=2).decode(TEXTS)
    assert [record["row_ids"] for record in other] != [record["row_ids"] for record in records]


def test_rows_begin_with_requested_prefixes():
    given = [{"source_ids": text, "row_prefixes": [[4, 5], [6]], "max_rows": 2} for text in TEXTS]
    for record in generator().decode(given):
        assert len(record["row_ids"]) == 2 and record["truncated"] is None
        assert record["row_ids"][0][:2] == [4, 5] and record["row_ids"][1][:1] == [6]
    (free,) = generator().decode([{"source_ids": TEXTS[0], "row_prefixes": [[4, 5]]}])
    assert free["row_ids"][0][:2] == [4, 5]
    (one,) = generator("sequential").decode([{"source_ids": TEXTS[0], "row_prefixes": [[4, 5]]}])
    assert one["row_ids"][0][:2] == [4, 5]


@pytest.mark.parametrize("strategy", ["pipelined", "sequential"])
def test_only_tokens_of_the_source_are_written(strategy):
    for text, record in zip(TEXTS, generator(strategy, limit="source", temperature=3.0).decode(TEXTS), strict=True):
        assert {token for row in record["row_ids"] for token in row} <= {*text}


def test_separator_tokens_are_always_allowed(tokenizer):
    """The tokens of the separator are allowed, but not the letters around it in its encoding."""
    made = generator("sequential", params=None)
    allowed = made.method().extra_allowed_ids(tokenizer)
    assert tokenizer.decode(allowed).strip() == made.config.data.separator.strip()
    assert not {*tokenizer.encode("a")} & {*allowed}


@pytest.mark.parametrize(
    ("separator", "begun", "whole", "expected"),
    [
        (" ; ", [3, 9, 3, 117], [3, 9, 3, 117, 3, 9], [3, 117]),
        ("; ", [3, 9, 117], [3, 9, 117, 3, 9], [117]),
        (";", [3, 9, 117], [3, 9, 117, 9], [117]),
        (" ;", [3, 9, 3, 117], [3, 9, 3, 117, 9], [3, 117]),
        (" and ", [3, 9, 11], [3, 9, 11, 3, 9], [11]),
        (", and", [3, 9, 6, 11], [3, 9, 6, 11, 9], [6, 11]),
        # A constructed case: its end and the next letter become one token.
        ("~", [3, 9, 50], [3, 9, 51, 52], [50, 51, 52]),
    ],
)
def test_separators_as_t5_encodes_them(separator, begun, whole, expected):
    """The ids are from T5's tokenizer (3 at the beginning of a word, 9 a letter a), except for the last ones."""
    ids = {"a": [3, 9], f"a{separator}": begun, f"a{separator}a": whole}
    method = methods.SequentialMethod(max_length=9, separator=separator, delay=1)
    assert method.extra_allowed_ids(SimpleNamespace(encode=ids.__getitem__)) == expected


@pytest.mark.parametrize(
    "given, found",
    [
        ({"row_prefixes": "ab"}, "row_prefixes"),
        ({"row_prefixes": [[3]] * 99}, "found 99 rows with prefixes; expected at most"),
        ({"row_prefixes": [[3], []]}, "found an empty prefix at 1"),
        ({"row_prefixes": [[99]]}, "found id 99"),
        ({"row_prefixes": [[3], [4, 1, 5]]}, r'"row_prefixes": found .4, 1, 5., in which 1 ends the row'),
        ({"row_prefixes": ["date:"]}, "no tokenizer"),
        ({"max_rows": 0}, "max_rows"),
        ({"row_prefixes": [[3], [4]], "max_rows": 1}, "at most"),
    ],
)
def test_invalid_row_prefixes_are_refused(given, found):
    with pytest.raises(UserError, match=found):
        generator().decode([{"source_ids": [3, 1], **given}])


def test_contradictory_settings_are_refused():
    with pytest.raises(UserError, match="source 0: found several row_prefixes with sequential decoding"):
        generator("sequential").decode([{"source_ids": [3, 1], "row_prefixes": [[3], [4]]}])
    with pytest.raises(UserError, match=r"decode\.samples: found 2 with decode\.temperature = 0"):
        generator(samples=2).decode([[3, 1]])
    for setting in ({"temperature": 1.0}, {"scores": True}, {"limit": "source"}):
        with pytest.raises(UserError, match=f"decode.{next(iter(setting))}: found .* with decode.beams = 2"):
            generator("sequential", beams=2, **setting).decode([[3, 1]])
