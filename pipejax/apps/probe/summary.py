"""Summarises the likelihoods of many examples: costs by condition, row and position, the graph of rows, a sentence.

A cost is the mean negative log-likelihood of a token under a condition, minus that with all earlier rows visible, in
nats. Its error is the standard error over examples.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

DELAYS = (4, 2, 1, 0)
# The names of the conditions, in the order of decreasing visibility.
NAMES = ("whole", *(f"delay_{delay}" for delay in DELAYS), "hidden")
ROWS = 8  # rows that have a line of a table and a node of the graph; later rows share a line
PLACES = ("first", "second", "third", "later", "last")  # positions of a token in its row
LEAST = 0.005  # nats per token; a smaller cost is not significant
MOST = 0.7  # the share of a cost that the word "mostly" requires


class Measured(TypedDict):
    """The measurement of one example."""

    id: str
    nll: dict[str, list[list[float]]]  # nats by condition, row and token
    without: list[list[float]]  # costs in nats, by row and by the earlier row that is hidden


class Cost(TypedDict):
    """A mean cost in nats per token, with its error and the number of tokens."""

    cost: float
    error: float
    tokens: int


class Parts(Cost):
    """The costs of a condition, by name: in total, by row, by position, and by both (cells)."""

    rows: dict[str, Cost]
    places: dict[str, Cost]
    cells: dict[str, dict[str, Cost]]
    says: str  # a phrase about where most of the cost is


class Summary(TypedDict):
    """The summary of a measurement."""

    examples: int
    tokens: int
    nll: dict[str, float]  # nats per token, by condition
    chance: float | None  # nats per token of guessing without the source, see `chance_of`; None: unknown
    conditions: dict[str, Parts]  # the costs under each condition but the first
    graph: list[list[Cost]]  # [row][earlier row], the cost of a row when it cannot see the earlier row
    says: str  # the sentence about the result


def mean(examples: Sequence[tuple[float, int]]) -> Cost:
    """Returns the mean cost of a token, from the nats and the number of tokens of each example."""
    count, total = len(examples), sum(tokens for _, tokens in examples)
    cost = math.fsum(nats for nats, _ in examples) / max(total, 1)
    # The squared errors of a ratio of two sums.
    squares = math.fsum((nats - cost * tokens) ** 2 for nats, tokens in examples)
    error = math.sqrt(squares * count / max(count - 1, 1)) / max(total, 1)
    return {"cost": round(cost, 6), "error": round(error, 6), "tokens": total}


def place_of(number: int, last: int) -> str:
    """Returns the name in PLACES of a token's position in its row, from 0; the last token has the position `last`."""
    return "last" if 0 < number == last else PLACES[min(number, 3)]


def row_of(number: int) -> str:
    """Returns the label of a row, counted from 0; rows from ROWS on share one."""
    return str(number + 1) if number < ROWS else f"{ROWS + 1}+"


def chance_of(tokens: Sequence[int], vocabulary: int) -> float:
    """Returns the nats per token of guessing by token frequencies, or of guessing uniformly if that is less.

    The probability of a token follows from the frequencies of all other tokens, smoothed for unseen ones (Witten and
    Bell 1991).
    """
    counts, nats = Counter(tokens), 0.0
    for times in counts.values():
        kinds = len(counts) - (times == 1)  # distinct tokens among the others
        seen = (times - 1) / (len(tokens) - 1 + kinds) if times > 1 else 0.0
        new = kinds / (len(tokens) - 1 + kinds) / max(vocabulary - kinds, 1) if kinds else 1 / vocabulary
        nats -= times * math.log(seen or new)
    return min(nats / len(tokens), math.log(vocabulary))


def summary(lines: Iterable[Measured], chance: float | None = None) -> Summary:
    """Returns the summary of the measured examples.

    `chance` is the nats per token of guessing; for a model that is no better, the sentence gives no advice.
    """
    means = defaultdict[tuple[str, str, str], list[tuple[float, int]]](list)
    graph = defaultdict[tuple[int, int], list[tuple[float, int]]](list)
    nats, count, tokens = dict.fromkeys(NAMES, 0.0), 0, 0
    for line in lines:
        count, nll = count + 1, line["nll"]
        tokens += sum(map(len, nll["whole"]))
        for name in NAMES:
            nats[name] += math.fsum(map(math.fsum, nll[name]))
            costs = defaultdict[tuple[str, str], list[float]](list)
            for i, (row, whole) in enumerate(zip(nll[name], nll["whole"], strict=True)):
                for j, (seen, best) in enumerate(zip(row, whole, strict=True)):
                    for key in {row_of(i), ""}:
                        costs[key, place_of(j, len(row) - 1)].append(seen - best)
                        costs[key, ""].append(seen - best)
            for (of_row, place), some in costs.items():
                means[name, of_row, place].append((math.fsum(some), len(some)))
        for i, above in enumerate(line["without"]):
            for k, cost in enumerate(above):
                graph[i, k].append((cost, len(nll["whole"][i])))
    names = sorted({of_row for _, of_row, _ in means if of_row})

    def places(name: str, of_row: str) -> dict[str, Cost]:
        return {place: mean(means[name, of_row, place]) for place in PLACES if (name, of_row, place) in means}

    conditions = dict[str, Parts]()
    for name in NAMES[1:]:
        conditions[name] = {
            **mean(means[name, "", ""]),
            "rows": {of_row: mean(means[name, of_row, ""]) for of_row in names},
            "places": places(name, ""),
            "cells": {of_row: places(name, of_row) for of_row in names},
            "says": "",
        }
    all_seen = nats["whole"] / max(tokens, 1)
    ignorant = chance is not None and all_seen >= chance
    for name, found in conditions.items():
        found["says"] = "" if ignorant else said(name, found)
    height = max((i + 1 for i, _ in graph), default=0)
    return {
        "examples": count,
        "tokens": tokens,
        "nll": {name: round(total / max(tokens, 1), 6) for name, total in nats.items()},
        "conditions": conditions,
        "graph": [[mean(graph[i, k]) for k in range(i)] for i in range(height)],
        "chance": None if chance is None else round(chance, 6),
        "says": ignorance(all_seen, chance) if chance is not None and ignorant else sentence(conditions),
    }


def ignorance(nats: float, chance: float) -> str:
    """Returns the sentence about a model that is no better than guessing."""
    return (
        f"The model does not know these answers: {nats:.2f} nats per token with all rows above visible, and "
        f"guessing by token frequencies reaches {chance:.2f}. Its costs are therefore meaningless. Train it first."
    )


def is_significant(found: Cost) -> bool:
    """Returns whether a cost is significant: at least LEAST, and at least two standard errors."""
    return found["cost"] >= max(LEAST, 2 * found["error"])


def said(name: str, found: Parts) -> str:
    """Describes the cost of a condition in words, and where most of it is."""
    what = "hiding the rows above" if name == "hidden" else f"Δt = {name.removeprefix('delay_')}"
    if not is_significant(found):
        return f"{what} costs nothing"
    return f"{what} costs {found['cost']:.2f} nats a token, {where(found)}"


def where(found: Parts) -> str:
    """Describes the rows and positions that most of a cost comes from."""
    total = _nats(found)
    place = max(found["places"], key=lambda place: _nats(found["places"][place]))
    if _nats(found["places"][place]) < MOST * total:
        return f"in all places of {_rows({row: _nats(part) for row, part in found['rows'].items()}, total)}"
    words = {"later": "fourth and later"}.get(place, place)
    of_rows = {row: _nats(parts[place]) for row, parts in found["cells"].items() if place in parts}
    return f"mostly in {words} tokens of {_rows(of_rows, total)}"


def _nats(part: Cost) -> float:
    return part["cost"] * part["tokens"]


def _rows(nats: Mapping[str, float], total: float) -> str:
    chosen = list[str]()
    for row in sorted(nats, key=lambda row: -nats[row]):
        if sum(nats[one] for one in chosen) >= MOST * total:
            break
        chosen.append(row)
    *others, last = sorted(chosen)
    return f"rows {', '.join(others)} and {last}" if others else f"row {last}"


def sentence(conditions: Mapping[str, Parts]) -> str:
    """Describes the cost of Δt = 1 and where it is, and the least Δt without a significant cost."""
    begun, hidden = conditions["delay_1"]["says"], conditions["hidden"]
    if is_significant(conditions["delay_1"]):
        enough = [delay for delay in sorted(DELAYS) if delay > 1 and not is_significant(conditions[f"delay_{delay}"])]
        most = conditions[f"delay_{max(DELAYS)}"]["cost"]
        end = f"Δt = {enough[0]} costs nothing" if enough else f"Δt = {max(DELAYS)} still costs {most:.2f}"
    elif is_significant(hidden):
        end = f"hiding the rows above costs {hidden['cost']:.2f}"
    else:
        return f"{begun}, and neither does hiding the rows above."
    return f"{begun}; {end}."
