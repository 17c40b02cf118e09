"""Regular expressions as automata over bytes equal Python's `re`, and numbers and dates equal Python's."""

import datetime
import json
import re
import time
import unicodedata
from typing import Any

import jsonschema
import numpy as np
import pytest

from pipejax.apps.schemas import json_schema, patterns
from pipejax.apps.schemas.expressions import LAST, Automaton, Expressions, TooLarge
from pipejax.apps.schemas.grammar import FAR, Table, TableTooLarge
from pipejax.system.errors import UserError
from support.schemas import FORMATS, PROPERTIES

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
    # Nested repetitions, some without counts.
    *("^(a{0,2}){1,3}$", "^(a{1,2}){2}$", "^((a?)*b+){2,}$", "^(a{2,3}){0,2}$", "^((a+)?){2,3}$", "^(a{2}){1,3}b?$"),
    *("^(a{2,})*$", "^(a{3}){1,}", "^(a+){2}b$", "^((a{0,2}b?){0,2}){0,2}$"),
    # Repetitions of expressions that may be empty.
    *("^(a?b?){2}$", "^(a*|bb){3}$", "^(a?b*){2,3}c?$"),
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
    automaton = compiled(patterns.read_pattern(pattern, made, "here"), made=made)
    theirs = re.compile(pattern.replace("$", r"\Z").replace("[^]", r"[\s\S]"), re.ASCII)
    found = 0
    for _ in range(1500):
        text = "".join(rng.choice([*"aaabbbcx-12é÷.\\] "], rng.integers(0, 7)))
        expected = theirs.search(text) is not None
        assert accepts(automaton, text.encode()) == expected, text
        found += expected
    assert found > 0 or pattern.startswith("^a{0}")


def test_spaces_are_white_space_in_ecma_262_and_unicode() -> None:
    """ECMA-262's white space and line ends are Unicode's separators and some others, without U+0085."""
    made = Expressions()
    starts = (patterns.read_pattern(pattern, made, "here") for pattern in (r"^\s$", r"^\S$"))
    automaton = compiled(*starts, made=made)
    for code in [*range(0x3100), *range(0xFE00, 0xFF00)]:
        is_space = unicodedata.category(chr(code)) == "Zs" or chr(code) in "\t\n\v\f\r\u2028\u2029"
        found = [accepts(automaton, chr(code).encode(), start) for start in (0, 1)]
        assert found[0] == is_space and not all(found), hex(code)


def test_characters_equal_utf_8() -> None:
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
def test_automaton_accepts_the_whole_numbers_of_a_range(low: int, high: int) -> None:
    made = Expressions()
    automaton = compiled(made.whole_numbers(low, high), made=made)
    for number in range(-1300, 1300):
        assert accepts(automaton, str(number).encode()) == (low <= number <= high)
    assert not any(accepts(automaton, text) for text in (b"-0", b"007", b"+1", b"", b"1 ", b"-"))


EVERY = [*range(0x780), *range(0x1670, 0x1690), *range(0x1FF0, 0x2070), 0x3000, *range(0xFEF0, 0xFF20), 0x1D7CE]
ECMA = {  # as listed in the standard
    "d": {*map(ord, "0123456789")},
    "w": {*map(ord, "0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")},
    "s": {9, 10, 11, 12, 13, 32, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF},
}


@pytest.mark.parametrize("letter", ["d", "w", "s"])
def test_character_classes_follow_ecma_and_python(letter: str) -> None:
    made, pattern = Expressions(), rf"\{letter}"
    forms = (pattern, pattern.upper(), f"[^{pattern}]", f"[^{pattern.upper()}]", f"[{pattern}x]", f"[^{pattern}x]")
    automaton = compiled(*(patterns.read_pattern(f"^{form}$", made, "here") for form in forms), made=made)
    for code in EVERY:
        char = chr(code)
        ours, theirs = code in ECMA[letter], re.fullmatch(pattern, char) is not None
        within, without = ours and theirs, not ours and not theirs
        wanted = (within, without, without, within, within or char == "x", without and char != "x")
        for i, expected in enumerate(wanted):
            assert accepts(automaton, char.encode(), i) == expected, (forms[i], code)
    if letter == "s":  # a byte order mark is white space in one of them, a file separator in the other
        assert all(not accepts(automaton, char.encode(), i) for char in "\ufeff\x1c\x1f" for i in (0, 1))


def texts_of(schema: object) -> tuple[Automaton, json_schema.Texts]:
    made = Expressions()
    asked = {"type": "object", "properties": {"a": schema}}
    found = json_schema.read_properties(asked, made, "here", longest=100, most=1)["a"]
    return compiled(found.expression, made=made), found


def test_dates_equal_the_calendar() -> None:
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


def test_numbers_equal_json() -> None:
    automaton, found = texts_of({"type": "number"})
    for text in ("0", "-1", "12.50", "1e5", "-3.25E-12", "9" * 18, " 7"):
        assert accepts(automaton, text.encode()) and found.read(text) == json.loads(text)
    for text in ("", "01", ".5", "5.", "1e", "+1", "NaN", "Infinity", "9" * 19, "--1", "1e999"):
        assert not accepts(automaton, text.encode())


def test_lists_are_separated_by_commas() -> None:
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


def test_equal_texts_mean_the_first_value() -> None:
    _, found = texts_of({"enum": ["5", 5, True, 2.5, None, "green fish"]})
    assert [found.read(text) for text in ("5", " true", "2.5", "null", "green fish")] == [
        "5",
        True,
        2.5,
        None,
        "green fish",
    ]


STRINGS = ["", "a", "ab", "é", "éö😀", "abc", "abcd", "red", "null", "true", "5", "a\nb"]
NUMBERS = [*range(-12, 13), 2.5, 7.5, -0.5, 100, 10**17]
VALUES: list[Any] = [*STRINGS, *NUMBERS, None, True, False]
LISTS: list[Any] = [
    [],
    ["a"],
    ["ab", "é"],
    [1],
    [1, 2],
    [1, 2, 3],
    [4, 5],
    [None],
    [7, None],
    ["a"] * 3,
    ["a"] * 4,
    [True, False],
]
JUDGED: list[dict[str, Any]] = [
    *({"type": "integer", key: bound} for key in ("minimum", "exclusiveMinimum") for bound in (-4, 0, 3, 2.5, -0.5, 7)),
    *({"type": "integer", key: bound} for key in ("maximum", "exclusiveMaximum") for bound in (-4, 0, 7, 7.5, -0.5, 9)),
    {"type": "integer", "minimum": 3, "exclusiveMinimum": 3},
    {"type": "integer", "minimum": 5, "exclusiveMinimum": 3, "maximum": 9, "exclusiveMaximum": 12},
    {"type": "integer", "exclusiveMinimum": -10, "exclusiveMaximum": -7},
    {"type": "integer", "exclusiveMaximum": 7, "maximum": 7},
    *({"type": "string", "minLength": least} for least in range(4)),
    *({"type": "string", "maxLength": most} for most in range(4)),
    {"type": "string", "minLength": 1, "maxLength": 1},
    {"type": "string", "pattern": "b", "minLength": 3},
    {"type": "string", "pattern": "^[ab]+$", "maxLength": 2},
    {"type": ["string", "null"], "minLength": 2},
    {"type": "number", "minimum": 0},
    {"type": "boolean"},
    {"type": "null"},
    {"const": "red"},
    {"const": None},
    {"type": "integer", "enum": [3, 4]},
    {"enum": ["red", "ab", 2.5]},
    {"anyOf": [{"type": "null"}, {"type": "integer", "exclusiveMinimum": 0}]},
    {"anyOf": [{"const": "ab"}, {"type": "null"}]},
    {"anyOf": [{"enum": ["ab", "red"], "type": "string"}, {"type": "null"}]},
    *({"type": "array", "items": {"type": "integer"}, "minItems": least} for least in range(4)),
    *({"type": "array", "items": {"type": "integer"}, "maxItems": most} for most in range(4)),
    {"type": "array", "items": {"type": "string", "maxLength": 1}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": ["integer", "null"], "exclusiveMinimum": 4}},
]


@pytest.mark.parametrize("schema", JUDGED, ids=json.dumps)
def test_values_equal_values_accepted_by_jsonschema(schema: dict[str, object]) -> None:
    """Each value is written as in a row; a row that two values share has the meaning of one of them."""
    automaton, found = texts_of(schema)
    judge = jsonschema.Draft202012Validator(schema)
    is_list, taken = schema.get("type") == "array", 0
    for value in LISTS if is_list else VALUES:
        texts = [one if isinstance(one, str) else json.dumps(one) for one in (value if is_list else [value])]
        text = ",".join(texts)
        if accepts(automaton, text.encode()):
            assert judge.is_valid(found.read(text)), text
        elif judge.is_valid(value):
            assert any(char < " " for char in text), text  # without a pattern there are no control characters
        taken += accepts(automaton, text.encode())
    assert taken


@pytest.mark.parametrize("name", PROPERTIES)
def test_texts_of_all_paths_through_the_automaton_are_valid(name: str) -> None:
    automaton, found = texts_of(PROPERTIES[name])
    judge, rng = jsonschema.Draft202012Validator(PROPERTIES[name], format_checker=FORMATS), np.random.default_rng(0)
    table = Table.lift(automaton[1:], [bytes([byte]) for byte in range(256)], most=10**7)
    distance, read = np.asarray(table.distance), set()
    for _ in range(150):
        state, text = automaton.starts[0], b""
        while distance[state] or rng.random() < 0.7:
            after = automaton.moves[automaton.kinds, state]
            # The shortest way to an accepting state.
            ways = np.flatnonzero(distance[after] < (distance[state] if len(text) > 30 else FAR))
            if not len(ways):
                break
            plain = ways[ways < 0x7F]
            byte = int(rng.choice(plain if len(plain) and rng.random() < 0.8 else ways))
            text, state = text + bytes([byte]), after[byte]
        value = found.read(text.decode())
        judge.validate(json.loads(json.dumps(value)))
        read.add(text)
    assert read


@pytest.mark.parametrize(
    "pattern",
    [
        "^((a{0,1000}){0,1000}){0,1000}$",
        "^((a{0,1000}b?){0,1000}){0,1000}$",
        "a.{15}b",
        "^(a?b?c?){0,900}x?(a?){0,300}$",
    ],
)
def test_work_for_an_automaton_is_bounded(pattern: str) -> None:
    begun, made = time.thread_time(), Expressions()
    with pytest.raises(TooLarge):
        compiled(patterns.read_pattern(pattern, made, "here"), made=made, most=1 << 15)
    assert time.thread_time() - begun < 8


@pytest.mark.parametrize(
    "schema", [{"pattern": "a" * 10**6}, {"pattern": f"[{'ab' * 500_000}]"}, {"enum": ["a" * 10**6]}], ids=range(3)
)
def test_work_for_long_texts_is_bounded(schema: dict[str, object]) -> None:
    begun = time.thread_time()
    with pytest.raises((TooLarge, UserError), match=r"steps of work|found a pattern of 1\d{6} characters; ex"):
        texts_of({"type": "string", **schema})
    assert time.thread_time() - begun < 4


def test_too_many_states_are_refused() -> None:
    made = Expressions()
    with pytest.raises(TooLarge, match="more than 500 states"):
        compiled(patterns.read_pattern("^(a|b)*a(a|b){12}$", made, "here"), made=made, most=500)


def test_table_of_tokens_equals_the_automaton_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, made = np.random.default_rng(0), Expressions()
    automaton = compiled(
        *(patterns.read_pattern(p, made, "here") for p in ("^(ab|ba)*c$", "^[abc]{3,5}$", "^d$")), made=made
    )
    tokens = [b"", *{bytes(rng.choice([*b"abc"], rng.integers(1, 5)).tolist()) for _ in range(40)}]
    table = Table.lift(automaton[1:], tokens, most=10**6)
    states = len(automaton.accepts)
    for state in range(states):
        for i, token in enumerate(tokens):
            expected = state if token else 0
            for byte in token:
                expected = int(automaton.moves[automaton.kinds[byte], expected])
            assert table.moves[table.kinds[i], state] == expected
    # The distance to the end, by breadth-first search.
    for start in range(states):
        reached, steps = {start}, 0
        while not any(automaton.accepts[state] for state in reached) and steps < 20:
            reached |= {int(table.moves[kind, state]) for kind in table.kinds for state in reached}
            steps += 1
        assert table.distance[start] == (steps if steps < 20 else FAR)
    # No token contains "d".
    assert (table.distance[states:] == FAR).all() and table.distance[automaton.starts[2]] == FAR
    with pytest.raises(TableTooLarge, match="more than 10 entries in its table"):
        Table.lift(automaton[1:], tokens, most=10)
    monkeypatch.setattr("pipejax.apps.schemas.grammar.WORK", 0)
    with pytest.raises(TableTooLarge, match="more than 0 entries to compute for its table"):
        Table.lift(automaton[1:], tokens, most=10**6)


def test_work_for_a_small_table_is_bounded() -> None:
    """256 tokens of 50 bytes change no state: of two states 50 x 256 x 2 entries are computed, for a table of 4."""
    automaton = np.arange(256), np.tile(np.arange(2, dtype=np.int32), (256, 1)), np.asarray([False, True])
    tokens = [bytes([byte]) * 50 for byte in range(256)]
    with pytest.raises(TableTooLarge):
        Table.lift(automaton, tokens, most=25_600 // 4 - 1)
    assert len(Table.lift(automaton, tokens, most=25_600 // 4).kinds) == 256
