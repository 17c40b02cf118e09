"""What is wished for in the answers of a batch, from the settings and what the sources say, for `decoding.choice`."""

import hashlib
from collections.abc import Sequence

import numpy as np

from pipejax import grid
from pipejax.config import DecodeConfig
from pipejax.decoding import Drafted, Pipelined, Sampling, Sequential, Strategy, Wishes
from pipejax.inference.sources import Source


def of_batch(
    sources: Sequence[Source],
    ids: Sequence[Sequence[int]],
    decode: DecodeConfig,
    strategy: Strategy,
    *,
    prefixes: Sequence[Sequence[Sequence[int]]],
    separator: Sequence[int],
    vocabulary: int,
) -> Wishes | None:
    """Arrays [B, ...] in NumPy; None if tokens are chosen greedily and nothing else is asked for.

    Args:
      sources: of the batch.
      ids: of each source.
      decode: the settings.
      strategy: that decodes.
      prefixes: of each source the ids with which its rows begin.
      separator: ids that part the rows of a sequential answer.
      vocabulary: V.
    """
    sampling = None
    if decode.temperature > 0:
        sampling = Sampling(
            temperature=np.full(len(ids), decode.temperature, np.float32),
            top_k=np.full(len(ids), decode.top_k, np.int32),
            top_p=np.full(len(ids), decode.top_p, np.float32),
            seed=np.asarray([seed_of(source, decode.seed) for source in sources], np.uint32),
        )
    forced = allowed = None
    rows, times, delay, eos = _shape(strategy)
    if any(source.prefixes or source.max_rows is not None for source in sources):
        forced = np.full((len(ids), rows, times), -1, np.int32)
        for b, source in enumerate(sources):
            for row, prefix in enumerate(prefixes[b][:rows]):
                here = forced[b, row, grid.start(row, delay) :]
                here[: len(prefix)] = prefix[: len(here)]
            if source.max_rows is not None and source.max_rows < rows:
                forced[b, source.max_rows, grid.start(source.max_rows, delay)] = eos
    if decode.limit == "source":
        allowed = np.zeros((len(ids), vocabulary), bool)
        allowed[:, [eos, *separator]] = True
        for b, of_source in enumerate(ids):
            allowed[b, np.asarray(of_source)] = True
    if sampling is None and forced is None and allowed is None and not decode.scores:
        return None
    return Wishes(sampling=sampling, forced=forced, allowed=allowed, scores=decode.scores)


def seed_of(source: Source, seed: int) -> int:
    """A number of 32 bits for a source's answer: by its id and the number of the sample, whatever the batch."""
    digest = hashlib.sha256(f"{seed}/{source.sample}/{source.id}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _shape(strategy: Strategy) -> tuple[int, int, int, int]:
    """Rows, times, delay and eos."""
    inner = strategy.grid if isinstance(strategy, Drafted) else strategy
    if isinstance(inner, Pipelined):
        return inner.rows, inner.time_max, inner.delay, inner.eos
    if isinstance(inner, Sequential):
        return 1, inner.max_length, 1, inner.eos
    return 0, 0, 1, 0  # beams, for which nothing is wished
