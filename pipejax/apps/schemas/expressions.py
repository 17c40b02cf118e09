"""Regular languages of UTF-8 text, as expressions over bytes, and the automaton that accepts them.

An expression is an index into its `Expressions`, which creates equal expressions only once. The automaton is built from
derivatives (Brzozowski, 1964): the derivative of a language by a byte is the set of texts that may follow that byte,
and each distinct derivative is a state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Ranges = Sequence[tuple[int, int]]  # code points, with both ends included

SURROGATES = (0xD800, 0xDFFF)  # surrogates are not characters and have no UTF-8 form
LAST = 0x10FFFF
MOST = 1 << 18  # steps of work, about a quarter of a second
EVERY = (1 << 256) - 1  # a mask with all bytes
FEWER = 0x7F, 0x7FF, 0xFFFF, LAST  # the last code points with one, two, three and four bytes


class TooLarge(Exception):
    """Raised if an automaton would have too many states or need too much work.

    `place` is the part of the schema, if known.
    """

    def __init__(self, found: str, place: str = "") -> None:
        super().__init__(found)
        self.place = place


class Automaton(NamedTuple):
    """A deterministic automaton over bytes. State 0 accepts nothing and has no transitions to other states."""

    starts: list[int]  # the initial state of each language
    kinds: np.ndarray  # i32 [256], the class of each byte; bytes of one class have the same transitions
    moves: np.ndarray  # i32 [classes, states], the next state
    accepts: np.ndarray  # bool [states]


class _Node(NamedTuple):
    """An expression: its kind, its parts, and the arguments of that kind."""

    kind: str
    parts: tuple[int, ...] = ()
    mask: int = 0  # the set of bytes that the expression matches, one bit for each
    least: int = 0  # the least count of a repetition
    most: int | None = None


class Expressions:
    """Creates expressions. `nothing` is the empty language; `empty` is the language of the empty text."""

    nothing, empty = 0, 1

    def __init__(self, most: int = MOST, pause: Callable[[], None] | None = None) -> None:
        """Creates the expressions `nothing`, `empty` and `everything`.

        Args:
          most: steps of work before TooLarge is raised.
          pause: called from time to time, to let other threads work.
        """
        self._most, self._pause = most, pause
        self._nodes = [_Node("nothing"), _Node("empty")]
        self._numbers = {node: i for i, node in enumerate(self._nodes)}
        self._nullable = [False, True]
        self._derived: dict[int, dict[int, int]] = {}
        self._examples = list[int]()  # one byte of each class
        self._work = 0
        self.everything = self.repeat(self._bytes(EVERY))

    def text(self, text: str) -> int:
        """Returns the language of a single text."""
        self._spend(4 * len(text))
        return self.join(*(self._bytes(1 << byte) for byte in text.encode()))

    def characters(self, ranges: Ranges) -> int:
        """Returns the language of single characters in the ranges, without surrogates."""
        found = []
        self._spend(32 + 8 * len(ranges))
        for first, last in ranges:
            for low, high in ((first, min(last, SURROGATES[0] - 1)), (max(first, SURROGATES[1] + 1), last)):
                for end in FEWER:
                    if low <= min(high, end):
                        ends = (chr(code).encode() for code in (low, min(high, end)))
                        found += self._between(*ends, least=0x80, most=0xBF)
                        low = end + 1
        return self.either(*found)

    def whole_numbers(self, low: int, high: int) -> int:
        """Returns the language of the decimal numbers from low to high."""
        if low < 0:
            below = self.join(self.text("-"), self.whole_numbers(max(-high, 1), -low))
            return self.either(below, self.whole_numbers(0, high)) if high >= 0 else below
        found = []
        while low <= high:
            last = min(high, 10 ** len(str(low)) - 1)
            found += self._between(str(low).encode(), str(last).encode(), least=ord("0"), most=ord("9"))
            low = last + 1
        return self.either(*found)

    def join(self, *parts: int) -> int:
        """Returns the concatenation of languages."""
        made = self.empty
        for part in reversed(parts):
            made = self._join(part, made)
        return made

    def either(self, *parts: int) -> int:
        """Returns the union of languages."""
        found, mask = set[int](), 0
        for one in self._flattened("either", parts):
            if self._nodes[one].kind == "bytes":
                mask |= self._nodes[one].mask
            elif one != self.nothing:
                found.add(one)
        if mask:
            found.add(self._bytes(mask))
        if self.everything in found:
            return self.everything
        if len(found) < 2:
            return next(iter(found), self.nothing)
        return self._make(_Node("either", (*sorted(found),)), any(self._nullable[one] for one in found))

    def both(self, *parts: int) -> int:
        """Returns the intersection of languages."""
        found = {*self._flattened("both", parts)} - {self.everything}
        if self.nothing in found:
            return self.nothing
        if len(found) < 2:
            return next(iter(found), self.everything)
        return self._make(_Node("both", (*sorted(found),)), all(self._nullable[one] for one in found))

    def repeat(self, part: int, least: int = 0, most: int | None = None) -> int:
        """Returns a language repeated from `least` to `most` times; None: without limit."""
        if most == 0 or part == self.empty:
            return self.empty
        if part == self.nothing:
            return self.empty if least == 0 else self.nothing
        if (least, most) == (1, 1):
            return part
        # The counts of both repetitions together have no gaps, so they merge.
        if (node := self._nodes[part]).kind == "repeat" and node.least < 2:
            part, least = node.parts[0], node.least * least
            most = None if most is None or node.most is None else node.most * most
        least = 0 if self._nullable[part] else least
        return self._make(_Node("repeat", (part,), least=least, most=most), least == 0)

    def compile(self, starts: Iterable[int], most: int) -> Automaton:
        """Builds the automaton of several languages, one initial state for each.

        Raises:
          TooLarge: the automaton would have more than `most` states, or need too much work.
        """
        masks = b"".join(node.mask.to_bytes(32, "little") for node in self._nodes if node.kind == "bytes")
        bits = np.unpackbits(np.frombuffer(masks, np.uint8).reshape(-1, 32), axis=1, bitorder="little")
        _, examples, kinds = np.unique(bits, axis=1, return_index=True, return_inverse=True)
        self._derived, self._examples = {}, examples.tolist()
        states: dict[int, int] = {self.nothing: 0}
        begins = [states.setdefault(start, len(states)) for start in starts]
        waiting, places, ends = list(states), list[tuple[int, int]](), list[int]()
        for number, state in enumerate(waiting):
            for kind, after in self._derive(state).items():
                if after not in states:
                    states[after] = len(states)
                    waiting.append(after)
                places.append((kind, number))
                ends.append(states[after])
            if len(states) > most:
                raise TooLarge(f"more than {most} states")
        moves: np.ndarray = np.zeros((len(examples), len(waiting)), np.int32)
        moves[tuple(np.asarray(places, np.int64).reshape(-1, 2).T)] = ends
        accepts = np.asarray([self._nullable[state] for state in waiting])
        return Automaton(begins, kinds.reshape(-1).astype(np.int32), moves, accepts)

    def without(self, part: int, byte: str) -> int:
        """Returns the texts that do not contain this one-byte character."""
        return self.both(part, self.repeat(self._bytes(EVERY - (1 << ord(byte)))))

    def not_first(self, part: int, byte: str) -> int:
        """Returns the texts that do not begin with this one-byte character."""
        return self.both(
            part, self.either(self.empty, self._join(self._bytes(EVERY - (1 << ord(byte))), self.everything))
        )

    def not_empty(self, part: int) -> int:
        """Returns the texts of at least one byte."""
        return self.both(part, self._join(self._bytes(EVERY), self.everything))

    def _flattened(self, kind: str, parts: Iterable[int]) -> Iterator[int]:
        for part in parts:
            found = self._nodes[part].parts if self._nodes[part].kind == kind else (part,)
            self._spend(len(found))
            yield from found

    def _spend(self, steps: int) -> None:
        self._work += steps
        if self._work > self._most:
            raise TooLarge(f"more than {self._most} steps of work")
        if self._pause:
            self._pause()

    def _make(self, node: _Node, nullable: bool) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
            self._nullable.append(nullable)
        return self._numbers[node]

    def _bytes(self, mask: int) -> int:
        return self._make(_Node("bytes", mask=mask), False) if mask else self.nothing

    def _range(self, low: int, high: int) -> int:
        return self._bytes((1 << (high + 1)) - (1 << low))

    def _join(self, first: int, rest: int) -> int:
        """Returns the concatenation of two languages."""
        self._spend(1)
        if self.nothing in (first, rest):
            return self.nothing
        if self.empty in (first, rest):
            return rest if first == self.empty else first
        node = self._nodes[first]
        if node.kind == "join":  # nested to the right, so that equal concatenations are created only once
            return self._join(node.parts[0], self._join(node.parts[1], rest))
        return self._make(_Node("join", (first, rest)), self._nullable[first] and self._nullable[rest])

    def _between(self, low: bytes, high: bytes, *, least: int, most: int) -> list[int]:
        """Returns the texts from low to high that have the same number of bytes, as several expressions.

        Each byte but the first is between `least` and `most`.
        """
        first, last, rests = low[0], high[0], len(low) - 1
        if not rests:
            return [self._range(first, last)]
        bottom, top, found = bytes([least]) * rests, bytes([most]) * rests, list[int]()
        ends = list[tuple[int, bytes, bytes]]()  # first bytes after which not every continuation is in the range
        if first == last:
            ends, first = [(first, low[1:], high[1:])], last + 1
        elif low[1:] != bottom:
            ends, first = [(first, low[1:], top)], first + 1
        if first <= last and high[1:] != top:
            ends, last = [*ends, (last, bottom, high[1:])], last - 1
        for byte, start, end in ends:
            after = self._between(start, end, least=least, most=most)
            found += (self._join(self._range(byte, byte), rest) for rest in after)
        if first <= last:
            found.append(self.join(self._range(first, last), *[self._range(least, most)] * rests))
        return found

    def _derive(self, number: int) -> dict[int, int]:
        """Returns the derivative of a language by each class of bytes; empty derivatives are left out."""
        if (found := self._derived.get(number)) is not None:
            return found
        node, made = self._nodes[number], dict[int, int]()
        if node.kind == "bytes":
            made = {kind: self.empty for kind, byte in enumerate(self._examples) if node.mask >> byte & 1}
        elif node.kind == "join":
            first, rest = node.parts
            made = self._append(first, rest)
            if self._nullable[first]:
                made = self._combine(self.either, (made, self._derive(rest)))
        elif node.kind == "repeat":
            most = None if node.most is None else node.most - 1
            made = self._append(node.parts[0], self.repeat(node.parts[0], max(node.least - 1, 0), most))
        elif node.kind == "either":
            made = self._combine(self.either, map(self._derive, node.parts))
        elif node.kind == "both":
            made = self._combine(self.both, map(self._derive, node.parts), len(node.parts))
        self._spend(len(made) + 1)
        self._derived[number] = made
        return made

    def _append(self, first: int, rest: int) -> dict[int, int]:
        """Returns the derivatives of a language, each concatenated with `rest`."""
        found = self._derive(first)
        joined = {after: self._join(after, rest) for after in {*found.values()}}
        return {kind: joined[after] for kind, after in found.items()}

    def _combine(self, of: Callable[..., int], several: Iterable[Mapping[int, int]], least: int = 1) -> dict[int, int]:
        """Combines the derivatives of several languages, class by class.

        A class is left out unless at least `least` of the languages have a derivative for it.
        """
        found, made = dict[int, list[int]](), dict[tuple[int, ...], int]()
        for one in several:
            self._spend(len(one))
            for kind, after in one.items():
                found.setdefault(kind, []).append(after)
        for parts in {tuple(parts) for parts in found.values() if len(parts) >= least}:
            made[parts] = of(*parts)
        ends = ((kind, made.get(tuple(parts), self.nothing)) for kind, parts in found.items())
        return {kind: end for kind, end in ends if end != self.nothing}
