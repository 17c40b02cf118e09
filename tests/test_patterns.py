"""Regular expressions as automata over bytes: against Python's `re`, and numbers and dates against Python's own."""

import datetime
import json
import re

import numpy as np
import pytest

from pipejax.data import json_schema, patterns
from pipejax.data.expressions import LAST, Automaton, Expressions, TooLarge
from pipejax.decoding.grammar import FAR, Table

PATTERNS = [
    *("abc|x", "^a*b+$", "^(ab|a){2,3}c?$", "^[^a-c]+$", r"^\d{1,3}-\w+$", "a.c", r"^\S+\s\S+$", "^é[à-ÿ]*$"),
    *(
        r"^[\]x-]+$",
        "^a$|b$",
        "",
        "^$",
        "^(a|b(c|a)*)*$",
        "^(?:a|)b*?$",
        r"\.|\\|\x61\u0062",
        "^[^]?$",
        "^a{0}b{2}$",
        "^a{2,}",
    ),
]


def compiled(*starts: int, made: Expressions, most: int = 20_000) -> Automaton:
    return made.compile(starts, most)


def accepts(automaton: Automaton, text: bytes, start: int = 0) -> bool:
    state = automaton.starts[start]
    for byte in text:
        state = automaton.moves[automaton.kinds[byte], state]
    return bool(automaton.accepts[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_find_the_texts_of_re(pattern: str) -> None:
    rng = np.random.default_rng(0)
    made = Expressions()
    automaton = compiled(patterns.read(pattern, made, "here"), made=made)
    theirs = re.compile(pattern.replace("$", r"\Z").replace("[^]", r"[\s\S]"), re.ASCII)
    found = 0
    for _ in range(1500):
        text = "".join(rng.choice([*"aaabbbcx-12é÷.\\] "], rng.integers(0, 7)))
        expected = theirs.search(text) is not None
        assert accepts(automaton, text.encode()) == expected, text
        found += expected
    assert found > 0 or pattern.startswith("^a{0}")


def test_characters_are_those_of_utf_8() -> None:
    made = Expressions()
    ranges = [(0x61, 0x63), (0x7F, 0x801), (0xD700, 0xE001), (0xFFFE, 0x10001), (0x10FFF0, LAST)]
    all_of, some = made.characters(patterns.inverse(())), made.characters(ranges)
    automaton = compiled(all_of, some, made=made)
    for code in [*range(0x900), *range(0xD600, 0xE100), *range(0xFF00, 0x10100), *range(0x10FF00, LAST + 1)]:
        if not 0xD800 <= code <= 0xDFFF:
            text = chr(code).encode()
            assert accepts(automaton, text)
            assert accepts(automaton, text, 1) == any(low <= code <= high for low, high in ranges)
    for text in (b"\xed\xa0\x80", b"\xc0\x80", b"\xe0\x80\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xc3", b"ab"):
        assert not accepts(automaton, text)


@pytest.mark.parametrize("low, high", [(-5, 17), (0, 0), (7, 1234), (-300, -12), (99, 101), (-1, 0), (-1000, 1000)])
def test_whole_numbers(low: int, high: int) -> None:
    made = Expressions()
    automaton = compiled(made.whole_numbers(low, high), made=made)
    for number in range(-1300, 1300):
        assert accepts(automaton, str(number).encode()) == (low <= number <= high)
    assert not any(accepts(automaton, text) for text in (b"-0", b"007", b"+1", b"", b"1 ", b"-"))


def texts_of(schema: object) -> tuple[Automaton, json_schema.Texts]:
    made = Expressions()
    asked = {"type": "object", "properties": {"a": schema}}
    found = json_schema.read_properties(asked, made, "here", longest=100)["a"]
    return compiled(found.expression, made=made), found


def test_dates_are_those_of_the_calendar() -> None:
    automaton, _ = texts_of({"type": "string", "format": "date"})
    for year in (1000, 1600, 1899, 1900, 2000, 2023, 2024, 2100, 2999):
        for month in range(14):
            for day in range(33):
                try:
                    datetime.date(year, month, day)
                    exists = True
                except ValueError:
                    exists = False
                assert accepts(automaton, f"{year}-{month:02}-{day:02}".encode()) == exists
    assert not any(accepts(automaton, text) for text in (b"0999-01-01", b"3000-01-01", b"2024-1-1", b"x2024-01-01"))


def test_numbers_are_those_of_json() -> None:
    automaton, found = texts_of({"type": "number"})
    for text in ("0", "-1", "12.50", "1e5", "-3.25E-12", "9" * 18, " 7"):
        assert accepts(automaton, text.encode()) and found.read(text) == json.loads(text)
    for text in ("", "01", ".5", "5.", "1e", "+1", "NaN", "Infinity", "9" * 19, "--1", "1e999"):
        assert not accepts(automaton, text.encode())


def test_lists_are_parted_by_commas() -> None:
    items = {"type": ["string", "null"], "maxLength": 4}
    automaton, found = texts_of({"type": "array", "items": items, "minItems": 1, "maxItems": 3})
    for text, value in (("a", ["a"]), (" a, bc,null", ["a", "bc", None]), ("a ,b", ["a ", "b"])):
        assert accepts(automaton, text.encode()) and found.read(text) == value
    for text in ("", "a,,b", "a,  b", "a,", ",a", "a,b,c,d", "abcde", "  a"):
        assert not accepts(automaton, text.encode())
    automaton, found = texts_of({"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2})
    for text in ("a,b", "a, b;c"):
        assert accepts(automaton, text.encode()) and found.read(text) == re.split(", ?", text)
    for text in ("a,b,c", "a, b, c", "a,b,c,d", "a"):  # no item has a comma within it
        assert not accepts(automaton, text.encode())
    automaton, found = texts_of({"type": "array", "items": items, "maxItems": 2})
    assert accepts(automaton, b"") and found.read("") == found.read(" ") == []


def test_texts_of_the_same_letters_mean_the_first_value() -> None:
    _, found = texts_of({"enum": ["5", 5, True, 2.5, None, "green fish"]})
    assert [found.read(text) for text in ("5", " true", "2.5", "null", "green fish")] == [
        "5",
        True,
        2.5,
        None,
        "green fish",
    ]


def test_too_many_states_are_refused() -> None:
    made = Expressions()
    with pytest.raises(TooLarge, match="more than 500 states"):
        compiled(patterns.read("^(a|b)*a(a|b){12}$", made, "here"), made=made, most=500)


def test_a_table_moves_as_its_bytes_and_knows_how_far_it_is() -> None:
    rng, made = np.random.default_rng(0), Expressions()
    automaton = compiled(*(patterns.read(p, made, "here") for p in ("^(ab|ba)*c$", "^[abc]{3,5}$", "^d$")), made=made)
    tokens = [b"", *{bytes(rng.choice([*b"abc"], rng.integers(1, 5)).tolist()) for _ in range(40)}]
    spelled = [[int(automaton.kinds[byte]) for byte in token] for token in tokens]
    table = Table.lift(automaton.moves, automaton.accepts, spelled, most=10**6)
    assert table is not None
    states = len(automaton.accepts)
    for state in range(states):
        for i, token in enumerate(tokens):
            expected = state if token else 0
            for byte in token:
                expected = int(automaton.moves[automaton.kinds[byte], expected])
            assert table.moves[table.kinds[i], state] == expected
    # How far it is, breadth first.
    for start in range(states):
        reached, steps = {start}, 0
        while not any(automaton.accepts[state] for state in reached) and steps < 20:
            reached |= {int(table.moves[kind, state]) for kind in table.kinds for state in reached}
            steps += 1
        assert table.distance[start] == (steps if steps < 20 else FAR)
    assert (table.distance[states:] == FAR).all() and table.distance[automaton.starts[2]] == FAR  # no token has a d
    assert Table.lift(automaton.moves, automaton.accepts, spelled, most=10) is None
