"""Random sources as a padded batch, and the rows of a decoded batch."""

import numpy as np

from pipejax.decoding import Decoded


def sources(rng: np.random.Generator, batch: int, vocab: int) -> list[list[int]]:
    """Draws sources of 1 to 16 ids."""
    return [rng.integers(0, vocab, rng.integers(1, 17)).tolist() for _ in range(batch)]


def padded(batch: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """A padded batch: source i32 [B, 16] and length i32 [B]."""
    length = np.asarray([len(s) for s in batch], np.int32)
    # Padding looks like tokens, so that only the length distinguishes it.
    source = np.full((len(batch), 16), 3, np.int32)
    for i, ids in enumerate(batch):
        source[i, : len(ids)] = ids
    return source, length


def rows_of(decoded: Decoded, b: int) -> list[list[int]]:
    """The tokens of each row of example `b`."""
    return [row[:n].tolist() for row, n in zip(decoded.tokens[b], decoded.lengths[b], strict=True)]
