"""Encoded sources of running batches, and a cache of them.

Shapes: B places for examples of a batch, L slots of the memory.
"""

from collections import OrderedDict
from collections.abc import Callable

import flax.struct
import jax
import numpy as np

from pipejax.decoding import SourceIds
from pipejax.model.t5 import Memory


@flax.struct.dataclass
class Encoded:
    """Encoded sources, one or all places of a batch, for the decoder and a drafter."""

    memory: Memory
    source: SourceIds | None  # the ids, for strategies that read them

    @property
    def length(self) -> int:
        """L, the number of slots of the memory."""
        length: int = self.memory.mask.shape[1]
        return length


class Encodings:
    """A least-recently-used cache of encoded sources of one model, by token ids and adapter.

    Only one thread may call its methods; all threads may read the counters.
    """

    def __init__(self, most: int) -> None:
        """Keeps the memories of at most `most` sources; 0 disables the cache."""
        self._most = most
        self._kept: OrderedDict[tuple[bytes, int | None, str], Memory] = OrderedDict()
        self.hits = self.misses = self.bytes = 0  # sources found, sources encoded, bytes of the kept memories

    def of(
        self,
        ids: np.ndarray,
        adapter: int | None,
        encode: Callable[[np.ndarray, int | None], Memory],
        *,
        kind: str = "",
    ) -> Memory:
        """Returns the memory of a source: the cached one, or the result of `encode`, which is then cached.

        Args:
          ids: i32 [n], the token ids.
          adapter: the number of the adapter, if there are adapters.
          encode: a function that encodes ids with an adapter.
          kind: the parts of the memories that `encode` returns; memories of another kind are not found.
        """
        key = ids.tobytes(), adapter, kind
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
        """Empties the cache and resets the counters."""
        self._kept.clear()
        self.hits = self.misses = self.bytes = 0


def _size(memory: Memory) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(memory))
