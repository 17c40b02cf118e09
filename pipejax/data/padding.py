"""Padded lengths. Every length costs a compilation, and every padding token costs time.

Training, encoding and decoding weigh these costs differently, so each has a function of its own.
"""

import math
from collections.abc import Sequence

import numpy as np


def pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """[B, length, ...], rows with zeros at the end. Lengths and weights tell what is padding, never an id of 0."""
    padded = np.zeros((len(rows), length, *rows[0].shape[1:]), rows[0].dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def round_up(length: int) -> int:
    """The padded length in training: a multiple of 8; above 128, one of 16 steps from one power of two to the next.

    `data.shapes` chooses a few of these lengths.
    """
    step = max(8, 1 << max(math.ceil(math.log2(max(length, 1))) - 5, 0))
    return max(math.ceil(length / step), 1) * step


def bucket(length: int) -> int:
    """The padded length of a source in inference: 16, 24, 32, 48, 64, 96, ..., for few compiled encoders."""
    power = 1 << max(math.ceil(math.log2(max(length, 1))), 4)
    return power * 3 // 4 if 16 < length <= power * 3 // 4 else power


def memory_length(length: int) -> int:
    """The padded length of an encoded source: a power of two from 64 on, for fewer compiled decoders than encoders."""
    return max(1 << (length - 1).bit_length(), 64)
