"""Compares prompt columns with plain teacher-forced passes, in which a column is a token of its row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.experiments.prompt_columns import COLUMNS, guess, wanted
from pipejax import grid
from pipejax.data.batches import collate
from pipejax.data.encoding import Encoded
from support import oracle
from support.tiny import FEW_WORDS

MODEL = dataclasses.replace(FEW_WORDS, vocab_size=12)
ROWS = {"one row": ([3, 4, 5, 6],), "rows": ([3, 4, 1], [5, 1], [6, 7, 8, 1])}


def laid_out(rows: Any) -> dict[str, Any]:
    """A batch of one example, with Δt = 1."""
    slots = [(row, row + j, token) for row, ids in enumerate(rows) for j, token in enumerate([0, *ids[:-1]])]
    row, time, inputs = (np.asarray(x, np.int32) for x in zip(*slots, strict=True))
    targets = np.asarray([token for ids in rows for token in ids], np.int32)
    flat = grid.Flat(inputs=inputs, targets=targets, row=row, time=time, weights=np.ones(len(row), np.float32))
    encoded = Encoded("", np.asarray([5, 9, 4, 1], np.int32), flat, False, False)
    return {name: jnp.asarray(x) for name, x in collate([encoded]).arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_logits_of_columns_equal_logits_of_tokens_at_their_places(rows: Any) -> None:
    params = oracle.random_params(MODEL, np.random.default_rng(0))
    batch, module, tokens = laid_out(rows), MODEL.module(), [7, 10, 2]
    table = params["shared"]["embedding"]
    source = batch["source"][:, : int(batch["source_length"][0])]
    mean = table[np.asarray(source[0])].mean(axis=0)
    columns = {"vectors": jnp.stack([table[token] - mean for token in tokens])}
    found = np.asarray(jax.jit(guess, static_argnums=0)(module, params, columns, batch))
    row, time, inputs = (np.asarray(batch[name][0]) for name in ("row", "time", "inputs"))
    for slot in range(int(batch["slots"][0])):
        for k in range(COLUMNS):
            before = [(int(r), int(t), int(x)) for r, t, x in zip(row, time, inputs, strict=True)]
            before = [s for s in before[: int(batch["slots"][0])] if s[0] <= row[slot] and s[1] <= time[slot]]
            own = [(int(row[slot]), int(time[slot]) + 1 + j, tokens[j]) for j in range(k + 1)]
            r, t, x = (np.asarray([values]) for values in zip(*before, *own, strict=True))
            seen = (r[:, None] <= r[:, :, None]) & (t[:, None] <= t[:, :, None])
            mask = np.ones(source.shape, bool)
            expected = module.apply({"params": params}, source, mask, x, seen, r + t)[0, -1]
            np.testing.assert_allclose(found[k, 0, slot], expected, atol=1e-5)


def test_columns_guess_later_tokens_of_their_row() -> None:
    tokens, exists = (np.asarray(x) for x in wanted(laid_out(ROWS["rows"])))
    assert exists[:, 0, :9].astype(int).tolist() == [
        [1, 1, 0, 1, 0, 1, 1, 1, 0],
        [1, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 0],
    ]
    assert tokens[0, 0, :9][exists[0, 0, :9]].tolist() == [4, 1, 1, 7, 8, 1]
    assert tokens[2, 0][exists[2, 0]].tolist() == [1]
