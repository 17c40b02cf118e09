"""The loss and the update of a step equal their definition, with a model of sums instead of the T5.

A token's output is a sum over all visible tokens, weighted by distance. So a wrong mask, distance or weight changes the
loss. The model compiles at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipejax import grid
from pipejax.data.batches import collate
from pipejax.data.encoding import Encoded
from pipejax.methods import losses
from pipejax.training.step import TrainState, batch_loss, train_step
from support import oracle
from support.tiny import FEW_WORDS

WORDS, WIDTH = 9, 6
loss_of = jax.jit(batch_loss, static_argnums=0)
SGD = optax.sgd(optax.constant_schedule(1.0))


@dataclasses.dataclass(frozen=True)
class Sums:
    """A model with the parts of `t5.T5` that a step uses."""

    dropout: float = 0.0
    config = FEW_WORDS

    def apply(self, variables: Any, *given: Any, method: str, **options: Any) -> Any:
        return getattr(self, method)(variables["params"], *given, **options)

    def hidden(self, params, source, source_mask, inputs, mask, position, sees_source, *, deterministic, rngs):
        """Outputs [G, N, D] for targets [G, N]; the sources of a group are concatenated, as its tokens see them."""
        known = (params["source"][source] * source_mask[..., None]).reshape(len(inputs), -1, WIDTH)
        seen = jnp.where(mask, 1 / (1 + jnp.maximum(position[:, :, None] - position[:, None], 0)), 0)
        found = seen @ params["target"][inputs] + sees_source.astype(jnp.float32) @ known
        return found if deterministic else found * jax.random.uniform(rngs["dropout"])

    def logits(self, params, hidden):
        """Logits [G, N, V]."""
        return hidden @ params["head"]


def parameters():
    rng = np.random.default_rng(1)
    shapes = {"source": (WORDS, WIDTH), "target": (WORDS, WIDTH), "head": (WIDTH, WORDS)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def examples(count, delay):
    """Sources and rows of ids, of many lengths."""
    rng = np.random.default_rng([count, delay])
    sources = [rng.integers(2, WORDS, rng.integers(1, 9)).tolist() for _ in range(count)]
    return [
        (source, [rng.integers(2, WORDS, rng.integers(1, 6)).tolist() for _ in range(rng.integers(0, 4))])
        for source in sources
    ]


def batch_of(given, delay, pack=1):
    flat = [grid.flatten(rows, delay=delay, bos=0, eos=1) for _, rows in given]
    encoded = [
        Encoded(str(i), np.asarray(source, np.int32), target, False, False)
        for i, ((source, _), target) in enumerate(zip(given, flat, strict=True))
    ]
    return collate(encoded, pack).arrays


def summed_loss(params, given, delay):
    """The sum over the tokens of all rows of all examples, and the number of tokens (paper, equation 6)."""
    layouts = [[[0, *row, 1] for row in [*rows, []]] for _, rows in given]
    cells = [(e, *cell) for e, layout in enumerate(layouts) for cell in oracle.coordinates(layout, delay)]
    tokens = np.asarray([token for layout in layouts for row in layout for token in row])
    read = [(e, token) for e, (source, _) in enumerate(given) for token in source]
    seen = np.zeros((len(cells), len(cells)), np.float32)
    for q, (example, row, time) in enumerate(cells):
        for k, (other, key_row, key_time) in enumerate(cells):
            if other == example and key_row <= row and key_time <= time:
                seen[q, k] = 1 / (1 + abs(row - key_row) + abs(time - key_time))
    reads = np.asarray([[other == example for other, _ in read] for example, _, _ in cells], np.float32)
    follows = np.asarray([i for i in range(len(cells) - 1) if cells[i][:2] == cells[i + 1][:2]])
    hidden = seen @ params["target"][tokens] + reads @ params["source"][np.asarray([token for _, token in read])]
    scores = jax.nn.log_softmax(hidden @ params["head"])
    return -scores[follows, tokens[follows + 1]].sum(), len(follows)


@pytest.mark.parametrize("delay, pack", [(1, 1), (1, 3), (2, 2)])
def test_the_loss_of_a_batch_is_the_definition(delay, pack):
    """Padding, an eos that is only fed, and other examples in the same sequence have no effect."""
    given, params = examples(6, delay), parameters()
    total, count = loss_of(Sums(), params, batch_of(given, delay, pack), None)
    expected, tokens = summed_loss(params, given, delay)
    assert count == tokens == sum(len(row) + 1 for _, rows in given for row in [*rows, []])
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_tokens_without_weight_are_not_in_the_mean(monkeypatch):
    """The mean over the whole batch and over parts divides the sum over counting tokens by their number."""
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(3, 24, WORDS)).astype(np.float32), rng.integers(0, WORDS, (3, 24))
    weights = rng.integers(0, 2, (3, 24)).astype(np.float32)
    likely = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -sum(np.log(likely[g, n, targets[g, n]]) for g in range(3) for n in range(24) if weights[g, n])
    for most in (losses.LOGITS, 3 * WORDS * 5):
        monkeypatch.setattr(losses, "LOGITS", most)
        found = losses.in_parts(losses.cross_entropy, lambda x: x, logits, targets, weights, vocabulary=WORDS)
        np.testing.assert_allclose(found, (expected, weights.sum()), rtol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_is_along_the_mean_over_the_tokens_of_the_whole_batch(accumulate):
    """Parts have uneven lengths; an update longer than `clip_norm` is scaled to it, and a shorter one is unchanged."""
    given, params = examples(8, 1), parameters()
    given[::2] = [(source, [[2] * 9, [3] * 9]) for source, _ in given[::2]]  # every second example is a part
    (total, count), gradient = jax.value_and_grad(summed_loss, has_aux=True)(params, given, 1)
    mean = jax.tree.map(lambda x: x / count, gradient)
    norm = float(optax.tree.norm(mean))
    for clip_norm in (10 * norm, norm / 10):
        step = jax.jit(
            lambda state, clip_norm=clip_norm: train_step(
                Sums(), SGD, state, batch_of(given, 1), jax.random.key(0), accumulate=accumulate, clip_norm=clip_norm
            )
        )
        new, told = step(TrainState(params, SGD.init(params)))
        found = told["loss"], told["tokens"], told["grad_norm"]
        np.testing.assert_allclose(found, (total / count, count, norm), rtol=1e-4)
        length = min(1.0, clip_norm / norm)
        for name, value in params.items():
            np.testing.assert_allclose(value - new.params[name], length * mean[name], rtol=2e-3, atol=1e-6)


def test_each_part_of_a_batch_draws_its_own_dropout():
    given, params = examples(3, 1)[:1], parameters()
    batch, key = batch_of(given * 2, 1), jax.random.key(4)
    model = Sums(dropout=0.5)
    own = [float(loss_of(model, params, batch_of(given, 1), jax.random.fold_in(key, i))[0]) for i in (0, 1)]
    step = jax.jit(lambda state: train_step(model, SGD, state, batch, key, accumulate=2)[1])
    told = step(TrainState(params, SGD.init(params)))
    assert own[0] != pytest.approx(own[1], rel=0.01)
    assert float(told["loss"] * told["tokens"]) == pytest.approx(sum(own), rel=1e-5)
