"""Loops over layers or parts of the logits have no array of zeros as input, which each iteration would read."""

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

from pipejax.methods import losses
from pipejax.model.attention import attend
from pipejax.model.dropout import drop

LARGE = 64  # elements


def whole(loop):
    """The inputs that each iteration of a loop reads whole, except slices and results of the last iteration."""
    inner = loop.params["jaxpr"].jaxpr

    def alike(outer, inner):
        return sum(a.aval.shape == b.aval.shape for a, b in zip(outer, inner, strict=True))

    return loop.invars[: alike(loop.invars, inner.invars) - alike(loop.outvars, inner.outvars)]


def constants(jaxpr):
    """The shapes of large arrays that loops read whole, and that do not depend on any input."""
    known, found = {}, []
    for step in jaxpr.eqns:
        inputs = [x for x in step.invars if not isinstance(x, jax.extend.core.Literal)]
        fixed = all(known.get(x, False) for x in inputs)
        known |= dict.fromkeys(step.outvars, fixed)
        if step.primitive.name == "scan":
            held = (x for x in whole(step) if not isinstance(x, jax.extend.core.Literal))
            found += [x.aval.shape for x in held if known.get(x, False) and x.aval.size >= LARGE]
        for inner in jax.extend.core.jaxprs_in_params(step.params):
            found += constants(inner)
    return found


def dropped(x, seeds):
    def layer(x, seed):
        return drop(x, seed, 0.1), None

    return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, seeds)[0].sum()


def attended(x, seeds):
    def layer(x, seed):
        return attend(x, x, x, jnp.zeros((1, 1, 1, 1)) * x[0, 0, 0, 0], seed, 0.1), None

    return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, seeds)[0].sum()


@pytest.mark.parametrize("function, shape", [(dropped, (8, 16)), (attended, (1, 1, 8, 16))])
def test_dropout_in_layers_needs_no_zeros(function, shape):
    jaxpr = jax.make_jaxpr(jax.grad(function))(jnp.ones(shape), jnp.ones((2, 2), jnp.uint32))
    assert constants(jaxpr.jaxpr) == []


def test_loss_in_parts_needs_no_zeros(monkeypatch):
    monkeypatch.setattr(losses, "LOGITS", 64)
    targets, weights = jnp.ones((2, 8), jnp.int32), jnp.ones((2, 8))

    def loss(hidden, targets):
        return losses.in_parts(losses.cross_entropy, lambda x: x * 2, hidden, targets, weights, vocabulary=32)[0]

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 8, 32)), targets)
    assert constants(jaxpr.jaxpr) == []


def test_array_of_zeros_is_detected():
    def plain(x):
        zeros = jnp.zeros(LARGE)
        return jax.lax.scan(lambda total, _: (total + zeros, None), x, length=2)[0]

    assert constants(jax.make_jaxpr(plain)(jnp.ones(LARGE)).jaxpr) == [(LARGE,)]
