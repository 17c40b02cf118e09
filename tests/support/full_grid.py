"""The definition of pipelined decoding over the whole grid: the reference for the packed decoder.

Every step computes all sub_max rows at all time_max times again, from the tokens so far, with the model of training:
there is no cache, no packing, and there are no sizes. Results are the fields of `decoding.Decoded`.
"""

from functools import partial
from typing import Any

import jax
import numpy as np

from pipejax import grid
from pipejax.decoding import Pipelined
from pipejax.model.t5 import T5

NEVER = 10**6


@partial(jax.jit, static_argnums=0)
def _best(model: T5, params: Any, *arrays: Any) -> Any:
    logits: Any = model.apply({"params": params}, *arrays)
    return logits.argmax(-1)


def decode(model: T5, params: Any, strategy: Pipelined, source: np.ndarray, length: np.ndarray) -> dict[str, Any]:
    """Tokens [B][rows][...], steps [B] and truncated [B] of a padded batch."""
    batch, rows, times = len(length), strategy.sub_max, strategy.time_max
    row, time = (x.reshape(-1) for x in np.meshgrid(np.arange(rows), np.arange(times), indexing="ij"))
    pairs = row[:, None], time[:, None], row[None, :], time[None, :]
    seen, position = grid.visible(*pairs), grid.position(row, time)[None]
    source_mask = np.arange(source.shape[1]) < length[:, None]

    tokens = np.zeros((batch, rows, times + 1), np.int32)
    started = [0] * batch
    end = np.full((batch, rows), NEVER)
    steps, done, empty = [0] * batch, np.zeros(batch, bool), np.zeros(batch, bool)
    for now in range(times):
        for b in (~done).nonzero()[0].tolist():
            if now % strategy.delay == 0 and started[b] < rows and (strategy.literal or not empty[b]):
                tokens[b, started[b], now] = strategy.bos
                started[b] += 1
        first = np.arange(rows) * strategy.delay
        reach = (time >= first[row]) & (time <= now)
        real = reach & (row < np.asarray(started)[:, None]) & (time <= end[:, row])
        mask = seen[None] & real[:, None, :]
        flat = tokens[:, :, :times].reshape(batch, -1)
        best = np.asarray(_best(model, params, source, source_mask, flat, mask, position)).reshape(batch, rows, times)
        for b in (~done).nonzero()[0].tolist():
            steps[b] = now + 1
            for i in range(started[b]):
                if end[b, i] == NEVER:
                    tokens[b, i, now + 1] = best[b, i, now]
                    if best[b, i, now] == strategy.eos:
                        end[b, i] = now + 1
                        empty[b] |= now == i * strategy.delay
            last = strategy.literal or empty[b] or started[b] == rows
            done[b] = last and (end[b, : started[b]] < NEVER).all()
    texts, truncated = [], []
    for b in range(batch):
        stop = np.minimum(end[b], steps[b] + 1)
        texts.append([tokens[b, i, i * strategy.delay + 1 : stop[i]].tolist() for i in range(started[b])])
        cut = (end[b, : started[b]] == NEVER).any()
        late = None if strategy.literal else "time_max"
        closed = None if empty[b] else "sub_max" if started[b] == rows else late
        truncated.append("time_max" if cut else closed)
    return {"rows": texts, "steps": steps, "truncated": truncated}
