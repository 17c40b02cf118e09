"""A T5 padded with zeros computes the logits of the small T5, as computed by the tests' T5 in NumPy."""

import dataclasses

import numpy as np
import pytest

from lab.experiments.widened import sizes_of, widened
from pipejax.config import T5Config
from pipejax.model.parameters import check_paths
from pipejax.system.errors import UserError
from support import oracle

SMALL = T5Config(vocab_size=11, d_model=12, d_kv=4, d_ff=16, num_heads=2, num_layers=1, num_decoder_layers=2)
LARGER = {"vocab_size": 20, "d_model": 40, "d_kv": 6, "d_ff": 24, "num_heads": 3}
LARGER |= {"num_layers": 2, "num_decoder_layers": 4}
GATED = {"feed_forward": "gated-gelu", "tied_head": False, "scale_head": False}


@pytest.mark.parametrize("kind", [{}, GATED], ids=["v1.0", "v1.1"])
def test_widened_model_has_the_logits_of_the_small_one(kind):
    small = dataclasses.replace(SMALL, layer_norm_epsilon=1e-2, **kind)
    large = sizes_of(small, LARGER)
    rng = np.random.default_rng(1)
    params = oracle.random_params(small, rng)
    larger = widened(params, small, large)
    check_paths("widened", {path: x.shape for path, x in flat(larger)}, large)
    source, rows = [3, 7, 10, 1], [[0, 5, 6, 1], [0, 4], [0]]
    for before, after in zip(
        oracle.grid_logits(params, small, oracle.encode(params, small, source), rows, delay=1),
        oracle.grid_logits(larger, large, oracle.encode(larger, large, source), rows, delay=1),
        strict=True,
    ):
        np.testing.assert_allclose(after[:, :11], before, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(after[:, 11:], np.repeat(after[:, :1], 9, axis=1), rtol=1e-12)  # the padding token's


def test_a_smaller_size_is_refused():
    with pytest.raises(UserError, match=r"^--model: found d_model 8; expected at least the checkpoint's 12$"):
        sizes_of(SMALL, {"vocab_size": 20, "d_model": 8})


def flat(tree, path=""):
    for name, value in tree.items():
        yield from flat(value, f"{path}{name}/") if isinstance(value, dict) else [(path + name, value)]
