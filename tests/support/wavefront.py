"""Verified drafts from their definition, in plain lists: what one decoder call after the other may accept.

The model is perfect: it says the rows of `oracle.algorithm1`. A token counts for others once it was fed together with,
or after, all that it can see, and only if it and all of that is right.
"""

from collections.abc import Callable, Sequence

Drafts = Callable[[int, int], Sequence[int]]  # of row i with so many tokens: how it may go on


def calls(rows: Sequence[Sequence[int]], drafts: Drafts, *, delay: int, time_max: int, eos: int = 1) -> int:
    """Decoder calls until all is written.

    Args:
      rows: the outcome of Algorithm 1, with bos and, where they ended, eos.
      drafts: asked in each call for each row that is open or may begin.
      delay: Δt; with 0 all rows begin in the first call.
      time_max: time-steps at the most.
      eos: ends a row.
    """
    cells = {(i, i * delay + j): token for i, row in enumerate(rows) for j, token in enumerate(row)}
    written = {(i, i * delay) for i in range(len(rows))}  # every bos is known, though not whether its row begins
    valid: set[tuple[int, int]] = set()  # cells that were fed and count

    def sees(cell: tuple[int, int]) -> set[tuple[int, int]]:
        return {(i, t) for i, t in cells if i <= cell[0] and t <= cell[1]}

    def newest(i: int) -> int:
        return max(t for row, t in written if row == i)

    asked = 0
    while not written >= cells.keys():
        fed: dict[tuple[int, int], int] = {}
        reach = time_max
        for i in range(len(rows)):
            now = newest(i)
            if now >= time_max or (now > i * delay and cells[i, now] == eos):
                continue
            if i * delay > reach:
                break
            guess = list(drafts(i, now - i * delay))
            guess = guess[: guess.index(eos) + 1] if eos in guess else guess
            for t, token in enumerate([cells[i, now], *guess], now):
                if t < time_max:
                    fed[i, t] = token
            if guess[:1] == [eos] and now == i * delay and delay:  # no row follows an empty one
                break
            if eos not in guess:
                reach = min(reach, now + len(guess))
        highest = max(i for i, _ in fed)
        for i in range(highest):
            if cells[i, newest(i)] == eos and newest(i) > i * delay:
                fed[i, newest(i)] = eos
        right = {cell for cell, token in fed.items() if cells.get(cell) == token}
        sound = valid | right
        new = {cell for cell in right if sees(cell) <= sound}
        valid |= new
        written |= {(i, t + 1) for i, t in valid if (i, t + 1) in cells}
        asked += 1
    return asked
