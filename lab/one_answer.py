"""Decodes one answer step by step, from the source to its rows: `python -m lab.one_answer` uses a small random T5.

The program calls the real parts of pipejax one after the other. The page "Read this first" names the fast form of each.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pipejax
from pipejax import grid
from pipejax.config import Config, GridConfig, T5Config
from pipejax.decoding import Pipelined
from pipejax.model.backbone import Backbone
from pipejax.testing import random_params


def write(config: Backbone, params: object, strategy: Pipelined, source: list[int]) -> list[list[int]]:
    """The rows of the answer to a source of token ids, by Algorithm 1 of the paper."""
    model = config.module()

    @jax.jit
    def step(*given: object) -> tuple[jax.Array, object]:
        hidden, cache = model.apply({"params": params}, *given, method="step")
        return model.apply({"params": params}, hidden, method="logits"), cache

    # 1. Encode. The memory holds the keys and values of the source for each layer: the decoder sees nothing else of it.
    ids = jnp.asarray([source])
    memory = jax.jit(partial(model.apply, method="encode"))({"params": params}, ids, jnp.ones_like(ids, bool))

    # 2. The loop. A strategy knows the grid and no model: it returns the tokens to feed, and their rows and times.
    width, used = strategy.most_queries, 0
    rows, times = (np.full(strategy.slots + width, 2**30) for _ in range(2))  # row and time of each slot of the cache
    cache, state = model.empty_cache(1, len(rows)), strategy.init(1)
    ask, advance = jax.jit(strategy.query), jax.jit(strategy.advance)
    while not strategy.done(state)[0]:
        # 3. A new row may start here. Each open row has a query for its next token.
        state, query = ask(state)
        live = np.flatnonzero(query.live[0])
        tokens, row, time = (np.zeros(width, np.int32) for _ in range(3))
        tokens[: len(live)] = query.tokens[0, live]
        row[: len(live)], time[: len(live)] = query.row[0, live], np.broadcast_to(query.time, query.live.shape)[0, live]
        rows[used : used + len(live)], times[used : used + len(live)] = row[: len(live)], time[: len(live)]

        # 4. One call of the decoder for all rows. The paper's idea is in these two lines: the mask and the positions.
        mask = grid.visible(row[:, None], time[:, None], rows, times)
        position, key_position = grid.position(row, time), grid.position(rows, times)
        given = (x[None] for x in (tokens, mask, position, key_position))
        logits, cache = step(*given, memory, cache, np.asarray([used]))
        used += len(live)

        # 5. Each open row gets its most likely token. A row ends with its eos, and an empty row ends the answer.
        answers = np.zeros(query.live.shape, np.int32)
        answers[0, live] = logits[0, : len(live)].argmax(axis=-1)
        state = advance(state, answers)
        printed = [f"row {query.row[0, i]} {query.tokens[0, i]} -> {answers[0, i]}" for i in live]
        print(f"step {time[: len(live)].max() + 1:2}: {',  '.join(printed)}")

    # 6. The finished rows, each from its first token.
    decoded = strategy.result(state)
    return [row[:n].tolist() for row, n in zip(decoded.tokens[0], decoded.lengths[0].tolist(), strict=True) if n]


def main(argv: list[str] | None = None) -> None:
    """Decodes an answer, and compares it with the answer of `Generator.decode`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--delay", type=int, default=2, help="steps between the starts of two rows")
    flags = parser.parse_args(argv)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=1, num_decoder_layers=2)
    params = random_params(config, config.eos_token_id, flags.seed)
    source, bounds = [5, 9, 14, 3, 1], GridConfig(delay=flags.delay, time_max=12, sub_max=4)
    rows = write(config, params, Pipelined(bounds.delay, bounds.time_max, bounds.sub_max), source)
    expected = pipejax.Generator(Config(model=config, grid=bounds), params, None).decode([source])[0]
    print(f"rows: {rows}")
    if rows != expected["row_ids"]:
        raise SystemExit(f"`Generator.decode` writes {expected['row_ids']}")
    print("`Generator.decode` writes the same")


if __name__ == "__main__":
    main()
