"""The branching decoder is compared with plain NumPy in float64: one phrase at a time, without a cache."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import config as config_lib
from pipejax import testing
from pipejax.apps import demo
from pipejax.apps.family.branches import Branches
from pipejax.apps.family.branching import CHOICES, Branching
from pipejax.config import Config, T5Config
from pipejax.data.batches import collate
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.decoding import TRUNCATIONS
from pipejax.inference.generator import Generator
from pipejax.methods import Ids
from pipejax.model import t5
from pipejax.training.step import batch_loss
from support import oracle
from support.batches import padded, rows_of, sources
from support.one_program import compiled
from support.tiny import FEW_WORDS, MODEL, RUN_ON_ONE

pytestmark = pytest.mark.usefixtures("compiled_once")

FEW = dataclasses.replace(FEW_WORDS, vocab_size=10, tied_head=False, scale_head=False)
EOS = 1


def branching_params(model: T5Config, rng: np.random.Generator, bias: float) -> dict[str, Any]:
    """Random parameters whose logits have about the mean -bias: the first hidden state is positive for all tokens."""
    params = oracle.random_params(model, rng, eos_scale=1.5)
    params["shared"]["embedding"][:, 0] = 3.0
    params["decoder"]["norm"]["scale"][0] = 1.0
    for i in range(model.num_decoder_layers):
        layer = params["decoder"][f"layers_{i}"]
        for part, output in (("self_attention", "output"), ("cross_attention", "output"), ("feed_forward", "wo")):
            layer[part][output]["kernel"][:, 0] = 0.0
    params["lm_head"]["kernel"][0] = -bias
    return params


def logits_after(params: Any, model: T5Config, encoded: np.ndarray) -> Callable[[Sequence[int]], np.ndarray]:
    """A function from the tokens of one phrase to the logits [V] of its next token."""

    def logits(phrase: Sequence[int]) -> np.ndarray:
        return oracle.grid_logits(params, model, encoded, [[0, *phrase]], 1)[0][-1]

    return logits


def branch(
    logits: Callable[[Sequence[int]], np.ndarray], strategy: Branches
) -> tuple[list[list[int]], int, str | None, float]:
    """Algorithm 1 of the paper: sorted phrases, steps, whether the limit was reached, and the smallest margin."""
    going: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[float, tuple[int, ...]]] = []
    steps, cut, margins = 0, False, [np.inf]
    while going:
        steps += 1
        values = [(float(x), phrase, score, token) for phrase, score in going for token, x in enumerate(logits(phrase))]
        values.sort(key=lambda each: -each[0])
        margins += [abs(x) for x, *_ in values]
        above = sum(x > 0 for x, *_ in values)
        cut |= above > strategy.rows
        taken = min(max(above, strategy.least - len(ended)), strategy.rows)
        margins += [a[0] - b[0] for a, b in zip(values[taken - 1 : taken], values[taken : taken + 1], strict=False)]
        going = []
        for x, phrase, score, token in values[:taken]:
            if token == EOS:
                ended.append(((score + x) / steps, phrase))
            else:
                going.append(((*phrase, token), score + x))
        if going and steps == strategy.times:
            cut |= not ended or any(score > 0 for _, score in going)
            going = []
    ended.sort(key=lambda each: -each[0])
    margins += [abs(mean) for mean, _ in ended]
    margins += [a[0] - b[0] for a, b in itertools.pairwise(ended)]
    above = sum(mean > 0 for mean, _ in ended)
    cut |= above > strategy.rows
    phrases = [[*phrase] for _, phrase in ended[: min(max(above, 1), strategy.rows)]]
    return phrases, steps, "max_length" if cut else None, min(margins)


@pytest.mark.parametrize(
    "rows, times, least",
    [(4, 5, 3), pytest.param(12, 6, 1, marks=pytest.mark.slow), pytest.param(8, 7, 6, marks=pytest.mark.slow)],
)
def test_answers_equal_plain_python(rows: int, times: int, least: int) -> None:
    strategy = Branches(rows, times, least)
    program, seen = compiled(FEW, strategy), Counter[str]()
    for seed in range(6):
        rng = np.random.default_rng([seed, rows])
        params = branching_params(FEW, rng, bias=4.0 + 3.0 * (seed % 3))
        texts = sources(rng, 4, FEW.vocab_size)
        decoded = jax.device_get(program(params, *padded(texts)))
        for b, text in enumerate(texts):
            logits = logits_after(params, FEW, oracle.encode(params, FEW, text))
            phrases, steps, truncated, margin = branch(logits, strategy)
            if margin < 1e-4:
                continue
            assert rows_of(decoded, b) == phrases + [[]] * (rows - len(phrases))
            assert (decoded.steps[b], TRUNCATIONS[decoded.truncated[b]]) == (steps, truncated)
            seen["cut" if truncated else "whole"] += 1
            seen["several"] += len(phrases) > 1
            seen["shared"] += len({*(p[0] for p in phrases if p)}) < sum(map(bool, phrases))
            seen["below others"] += int(steps < decoded.steps.max())
    assert all(seen[key] for key in ("cut", "whole", "several", "shared", "below others")), seen


@pytest.mark.slow
def test_generator_returns_phrases_in_the_order_of_their_means() -> None:
    rng = np.random.default_rng(5)
    params, method = branching_params(FEW, rng, bias=6.0), Branching(8, 6, 2)
    generator = Generator(Config(model=FEW, method=method), params, None)
    texts, compared = [[*text, EOS] for text in sources(rng, 6, FEW.vocab_size)], 0
    for size in (1, 6):
        for text, record in zip(texts, generator.decode(texts, batch_size=size), strict=True):
            logits = logits_after(params, FEW, oracle.encode(params, FEW, text))
            phrases, steps, truncated, margin = branch(logits, Branches(8, 6, 2))
            if margin > 1e-4:
                compared += 1
                expected = [phrase for phrase in phrases if phrase], steps, truncated
                assert (record["row_ids"], record["steps"], record["truncated"]) == expected
    assert compared > 6


def trie_loss(logits: Callable[[Sequence[int]], np.ndarray], phrases: Sequence[Sequence[int]]) -> tuple[float, int]:
    """The ZLPR loss of every beginning of a set of phrases, and the number of beginnings."""
    beginnings = {(*phrase[:j],) for phrase in phrases for j in range(len(phrase) + 1)}
    total = 0.0
    for beginning in beginnings:
        following = {[*phrase, EOS][len(beginning)] for phrase in phrases if (*phrase[: len(beginning)],) == beginning}
        x = logits(beginning)
        total += np.log1p(sum(np.exp(-x[token]) for token in following))
        total += np.log1p(sum(np.exp(x[token]) for token in range(len(x)) if token not in following))
    return total, len(beginnings)


def test_loss_equals_plain_python() -> None:
    """Shared beginnings count once, phrases see only themselves, and the order of a target has no effect."""
    words, config = demo.DemoTask().tokenizer(), dataclasses.replace(RUN_ON_ONE, method=Branching())
    targets = [
        ("red apples", "red lamps", "red apples white", "maps"),
        ("maps", "red apples white", "red lamps", "red apples", "red apples"),
        ("bread",),
        (),
    ]
    encoded = [
        encode_example(Example(f"{i}", f"the clerk {i}", rows), words, config, MODEL) for i, rows in enumerate(targets)
    ]
    params = oracle.random_params(MODEL, np.random.default_rng(3))
    compute = jax.jit(lambda p, arrays: batch_loss(t5.T5(MODEL), p, arrays, None, Branching().loss))
    found, count = compute(params, jax.tree.map(jnp.asarray, collate(encoded).arrays))
    expected, beginnings = 0.0, 0
    for one, rows in zip(encoded, targets, strict=True):
        logits = logits_after(params, MODEL, oracle.encode(params, MODEL, one.source.tolist()))
        mine, own = trie_loss(logits, [words.encode(row) for row in rows] or [[]])
        expected, beginnings = expected + mine, beginnings + own
    assert count == beginnings
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_loss_and_gradient_of_large_logits_are_finite() -> None:
    logits = jnp.asarray([[[300.0, -300.0, 0.0, 500.0]]])
    targets, weights = jnp.full((1, 1, CHOICES), 1), jnp.zeros((1, 1, CHOICES)).at[0, 0, 0].set(1)
    (value, _), gradient = jax.value_and_grad(Branching().loss, has_aux=True)(logits, targets, weights)
    assert value == pytest.approx(800.0) and np.isfinite(gradient).all()
    assert gradient[0, 0].tolist() == pytest.approx([0.0, -1.0, 0.0, 1.0])


def test_long_and_many_phrases_are_left_out() -> None:
    words, ids = demo.DemoTask().tokenizer(), Ids(0, EOS)

    def laid(method: Branching, rows: Sequence[str], most: int) -> tuple[list[int], bool, float]:
        target = method.target(rows, words, ids, most=most, where="here")
        return target.flat.inputs.tolist(), target.was_cut, float(target.flat.weights.max(axis=1).sum())

    red, apples, maps = words.encode("red apples maps")
    assert laid(Branching(), ["red apples", "maps"], 9) == ([0, red, apples, 0, maps], False, 4.0)
    assert laid(Branching(rows=1), ["red apples", "maps"], 9) == ([0, red, apples], True, 3.0)
    assert laid(Branching(times=2), ["red apples", "maps"], 9) == ([0, maps], True, 2.0)
    assert laid(Branching(), ["red apples", "maps"], 4) == ([0, red, apples], True, 3.0)
    # A single phrase that is too long is cut, and its end is not learned.
    assert laid(Branching(), ["red apples"], 2) == ([0, red], True, 1.0)
    assert laid(Branching(), [], 9) == ([0], False, 1.0)


def test_method_is_named_by_one_word() -> None:
    config = config_lib.override(Config(), ["method=branching", "method.rows=5"])
    assert config.method == Branching(rows=5)
    again = config_lib.override(config, ["method=branching", "method.times=9"])
    assert again.method == Branching(rows=5, times=9)


@pytest.mark.slow
def test_method_keeps_the_rules() -> None:
    assert testing.check_method(Branching(rows=6, times=6)).startswith("Branching: ")
