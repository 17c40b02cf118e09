"""To what lengths arrays are padded. Each length compiles, and each padded token costs: three uses, three balances."""

import math
from collections.abc import Sequence

import numpy as np


def pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """[B, length], zeros at the end; what is real is told by lengths and weights, never by id."""
    padded = np.zeros((len(rows), length), rows[0].dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def round_up(length: int) -> int:
    """Of what is trained on: multiples of 8, from 128 on sixteen to a doubling; `shapes` takes a few of them."""
    step = max(8, 1 << max(math.ceil(math.log2(max(length, 1))) - 5, 0))
    return max(math.ceil(length / step), 1) * step


def bucket(length: int) -> int:
    """Of a source that is decoded: 16, 24, 32, 48, 64, 96, ..., so that all share a few compiled encoders."""
    power = 1 << max(math.ceil(math.log2(max(length, 1))), 4)
    return power * 3 // 4 if 16 < length <= power * 3 // 4 else power


def memory_length(length: int) -> int:
    """Of an encoded source: a power of two, so that fewer decoders compile than encoders."""
    return max(1 << (length - 1).bit_length(), 64)
