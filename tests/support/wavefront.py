"""The definition of verified drafts in plain lists: the tokens that each decoder call may accept.

The model is perfect: it answers with the rows of `oracle.algorithm1`. A token is valid for other tokens as soon as it
was fed together with, or after, all tokens that it sees, and only if it and all of these tokens are correct.
"""

from collections.abc import Callable, Sequence

Drafts = Callable[[int, int], Sequence[int]]  # the draft for a row after a number of tokens
Asked = tuple[int, int, int, list[int]]  # a row, tokens written to it, drafts accepted, and what was drafted


def calls(
    rows: Sequence[Sequence[int]],
    drafts: Drafts,
    *,
    delay: int,
    time_max: int,
    literal: bool = False,
    unique: bool = False,
    eos: int = 1,
) -> int:
    """The number of decoder calls until all rows are written; the arguments are the arguments of `trace`."""
    return len(trace(rows, drafts, delay=delay, time_max=time_max, literal=literal, unique=unique, eos=eos))


def trace(
    rows: Sequence[Sequence[int]],
    drafts: Drafts,
    *,
    delay: int,
    time_max: int,
    sub_max: int = 0,
    literal: bool = False,
    unique: bool = False,
    eos: int = 1,
) -> list[list[Asked]]:
    """Returns, for each decoder call until all rows are written, the queried rows and the accepted tokens.

    Args:
      rows: the result of Algorithm 1, with bos and, in ended rows, eos.
      drafts: called in each decoder call for each row that is open or may begin.
      delay: Δt; with 0 all rows begin in the first call.
      time_max: most time-steps.
      sub_max: most rows, including rows that are queried but do not begin; 0: no such rows.
      literal: whether rows start until all rows have ended, as in Algorithm 1; otherwise until a row is empty.
      unique: whether no row starts after two adjacent rows that each equal an earlier row, unless `literal`.
      eos: the token that ends a row.
    """
    cells = {(i, i * delay + j): token for i, row in enumerate(rows) for j, token in enumerate(row)}
    most = max(min(sub_max, -(-time_max // delay)), len(rows)) if delay else len(rows)
    written = {(i, i * delay) for i in range(most)}  # every bos is known, but not whether its row begins
    valid: set[tuple[int, int]] = set()  # cells that were fed and count

    def sees(cell: tuple[int, int]) -> set[tuple[int, int]]:
        return {(i, t) for i, t in cells if i <= cell[0] and t <= cell[1]}

    def newest(i: int) -> int:
        return max(t for row, t in written if row == i)

    def ended(i: int) -> bool:
        return newest(i) > i * delay and cells[i, newest(i)] == eos

    def none_starts() -> bool:
        """Returns whether the written rows imply that no further row starts."""
        if not delay:
            return False
        begun = [i for i in range(most) if newest(i) > i * delay]
        if literal:
            return bool(begun) and all(ended(i) and newest(i) <= len(begun) * delay for i in begun)
        ends = {i: newest(i) for i in begun if ended(i)}
        said = {i: [cells[i, t] for t in range(i * delay + 1, end)] for i, end in ends.items()}
        again = [i for i in said if any(said[i] == said[j] for j in said if j < i)]
        circles = unique and any(i + 1 in again and max(ends[i], ends[i + 1]) <= len(begun) * delay for i in again)
        return circles or any(said[i] == [] for i in said)

    found = []
    while not written >= cells.keys():
        fed: dict[tuple[int, int], int] = {}
        proposed: dict[int, list[int]] = {}
        reach = time_max
        for i in range(most):
            now = newest(i)
            if now >= time_max or ended(i):
                continue
            if i * delay > reach or (now == i * delay and none_starts()):
                break
            guess = list(drafts(i, now - i * delay))
            guess = guess[: guess.index(eos) + 1] if eos in guess else guess
            # Tokens later than the drafts of the rows above cannot be valid; there is no query at the last time-step.
            guess = guess[: max(min(reach, time_max - 1) - now, 0)]
            proposed[i] = guess
            for t, token in enumerate([cells.get((i, now), 0), *guess], now):
                fed[i, t] = token
            if guess[:1] == [eos] and now == i * delay and delay:  # no row follows an empty row
                break
            if eos not in guess:
                reach = min(reach, now + len(guess))
        highest = max(i for i, _ in fed)
        for i in range(highest):
            if ended(i):
                fed[i, newest(i)] = eos
        right = {cell for cell, token in fed.items() if cells.get(cell) == token}
        sound = valid | right
        valid |= {cell for cell in right if sees(cell) <= sound}
        more = {(i, t + 1) for i, t in valid if (i, t + 1) in cells} - written
        asked = []
        for i, guess in proposed.items():
            counted = [(i, t) in valid for t in range(newest(i) + 1, newest(i) + 1 + len(guess))]
            accepted = counted.index(False) if False in counted else len(counted)
            asked.append((i, sum(row == i for row, _ in more), accepted, guess))
        found.append(asked)
        written |= more
    return found
