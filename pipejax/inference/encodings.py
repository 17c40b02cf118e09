"""The encodings of the latest sources: an answer to a source that was just encoded need not wait for the encoder."""

from collections import OrderedDict
from collections.abc import Callable

import jax
import numpy as np

from pipejax.model.t5 import Memory


class Encodings:
    """Memories of sources by ids and adapter; the one that was not asked for the longest makes room for a new one.

    Of one model, and written by one thread; any may read the numbers.

    Attributes:
      hits: sources that were found.
      misses: sources that had to be encoded.
      bytes: that the kept memories take on the device.
    """

    def __init__(self, most: int) -> None:
        """Keeps the memories of at most so many sources; 0: of none."""
        self._most = most
        self._kept: OrderedDict[tuple[bytes, int | None], Memory] = OrderedDict()
        self.hits = self.misses = self.bytes = 0

    def of(self, ids: np.ndarray, adapter: int | None, encode: Callable[[np.ndarray, int | None], Memory]) -> Memory:
        """The memory of a source, i32 [L]: the very arrays that `encode` made of the same before, if they are kept."""
        key = ids.tobytes(), adapter
        memory = self._kept.pop(key, None)
        if memory is not None:
            self.hits += 1
        else:
            self.misses += 1
            memory = encode(ids, adapter)
            self.bytes += _size(memory)
        self._kept[key] = memory
        while len(self._kept) > self._most:
            self.bytes -= _size(self._kept.popitem(last=False)[1])
        return memory

    def clear(self) -> None:
        """Keeps none, and counts from zero."""
        self._kept.clear()
        self.hits = self.misses = self.bytes = 0


def _size(memory: Memory) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(memory))
