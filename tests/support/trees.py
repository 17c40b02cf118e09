"""Comparisons of two trees of arrays, leaf by leaf."""

from typing import Any

import jax
import numpy as np


def close(a: Any, b: Any, **tolerance: Any) -> None:
    """Asserts that the trees differ by at most `tolerance`: rtol, atol."""
    for one, other in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


def same_bits(a: Any, b: Any) -> None:
    """Asserts that the trees are equal in every bit."""
    for one, other in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(one, other)
