"""Reads the regular expressions of JSON schemas (ECMA 262, flag u), without backreferences and look-around."""

import functools
import re

from pipejax.apps.schemas.expressions import LAST, Expressions, Ranges
from pipejax.system.errors import UserError

DIGITS = ((ord("0"), ord("9")),)
WORD = (*DIGITS, (ord("A"), ord("Z")), (ord("_"), ord("_")), (ord("a"), ord("z")))
SPACE = (
    *((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
LINE_ENDS = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))
CLASSES = {"d": DIGITS, "w": WORD, "s": SPACE}  # the definitions that ECMA 262 and Unicode share
CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD, "0": 0x0}
GROUPS = {"?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind", "?<": "name of a group"}
ESCAPES = {"123456789": "backreference", "k": "backreference", "bB": "boundary of words", "pP": "property of Unicode"}
ESCAPES |= {"c": "control character by its letter"}
REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
MOST_REPEATS = 1000
LONGEST = 10_000
_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")


def read_pattern(pattern: str, made: Expressions, where: str) -> int:
    """Returns the texts that contain a match of a pattern, as an expression; `^` and `$` anchor the match.

    Raises:
      UserError: the pattern is invalid or unsupported.
    """
    if len(pattern) > LONGEST:
        raise UserError(where, found=f"a pattern of {len(pattern)} characters", expected=f"at most {LONGEST}")
    try:
        return _PatternReader(pattern, made, where).read()
    except RecursionError as error:
        raise UserError(where, found="groups nested too deeply", expected="fewer levels") from error


def inverse(ranges: Ranges) -> Ranges:
    """Returns all characters that are not in the ranges."""
    found, begin = [], 0
    for first, last in sorted(ranges):
        if begin < first:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    return [*found, (begin, LAST)] if begin <= LAST else found


class _PatternReader:
    """A recursive descent parser of one pattern."""

    def __init__(self, pattern: str, made: Expressions, where: str) -> None:
        self._text, self._made, self._where, self._place, self._depth = pattern, made, where, 0, 0

    def read(self) -> int:
        """Parses the whole pattern."""
        found = self._either()
        if self._place < len(self._text):
            raise self._refusal("')' without '('", r"a bracket that opens it, or '\)'")
        return found

    def _refusal(self, found: str, expected: str = "") -> UserError:
        at = f"{self._text[:60]!r} with {found} at character {self._place}"
        return UserError(self._where, found=f"{at}", expected=f"{expected or f'a regular expression of {KNOWN}'}")

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _take(self, text: str) -> bool:
        taken = self._text.startswith(text, self._place)
        self._place += len(text) if taken else 0
        return taken

    def _either(self) -> int:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return self._made.either(*found)

    def _sequence(self) -> int:
        """Parses one alternative. Without `^` or `$` around it, any text may precede or follow it."""
        top, parts = self._depth == 0, list[int]()
        begins = top and self._take("^")
        while self._peek() not in ("", "|", ")", "$"):
            parts.append(self._repeated())
        ends = top and self._take("$")
        if self._peek() not in ("", "|", ")"):
            if not top:
                raise self._refusal("'$' in a group", "it around all of an alternative")
            raise self._refusal("'$' before its end", r"it at the end of an alternative, or '\$'")
        before, after = ([] if held else [self._made.everything] for held in (begins, ends))
        return self._made.join(*(before if top else ()), *parts, *(after if top else ()))

    def _repeated(self) -> int:
        """Parses an atom and its quantifier."""
        part = self._atom()
        if self._peek() and self._peek() in REPEATS:
            least, most = REPEATS[self._peek()]
            self._place += 1
        elif count := _COUNT.match(self._text, self._place):
            shown = repr(count[0]) if len(count[0]) <= 20 else f"{count[0][:20]!r}..."
            if len(count[0]) > 20:  # `int` refuses very long numbers
                raise self._refusal(shown, f"at most {MOST_REPEATS} repeats")
            least = int(count[1])
            most = least if count[2] is None else int(count[3]) if count[3] else None
            if max(least, most or 0) > MOST_REPEATS:
                raise self._refusal(shown, f"at most {MOST_REPEATS} repeats")
            if most is not None and most < least:
                raise self._refusal(shown, "the smaller count first")
            self._place = count.end()
        else:
            return part
        self._take("?")  # a lazy quantifier, which matches the same texts
        return self._made.repeat(part, least, most)

    def _atom(self) -> int:
        """Parses a group, a set, an anchor or a single character."""
        if self._take("("):
            if not self._take("?:") and self._peek() == "?":
                start = next((x for x in GROUPS if self._text.startswith(x, self._place)), "?")
                raise self._refusal(repr(f"({start}"), f"no {GROUPS.get(start, 'flags of a group')}")
            self._depth += 1
            found = self._either()
            self._depth -= 1
            if not self._take(")"):
                raise self._refusal("'(' without ')'", r"a bracket that closes it, or '\('")
            return found
        if self._take("["):
            return self._made.characters(self._set())
        if self._take("."):
            return self._made.characters(inverse(LINE_ENDS))
        if (char := self._peek()) in ("*", "+", "?"):
            raise self._refusal(f"{char!r} after nothing that it repeats", f"a character before it, or '\\{char}'")
        if char == "^":
            where = "in a group" if self._depth else "after its beginning"
            raise self._refusal(f"'^' {where}", r"it around all of an alternative, or '\^'")
        if char in ("{", "}", "]"):
            raise self._refusal(f"{char!r} by itself", f"'\\{char}'")
        return self._made.characters(self._character())

    def _set(self) -> Ranges:
        """Parses the rest of a set in brackets, after the opening one."""
        inverted, found = self._take("^"), list[tuple[int, int]]()
        while not self._take("]"):
            first = self._character(wide=inverted)
            if self._peek() == "-" and self._text[self._place + 1 : self._place + 2] not in ("]", ""):
                self._place += 1
                last = self._character()
                if not _is_one(first) or not _is_one(last):
                    raise self._refusal("a class at an end of a range", "a character at both ends")
                if first[0][0] > last[0][0]:
                    raise self._refusal("a range of no characters", "the lower character first")
                first = [(first[0][0], last[0][0])]
            found += first
        return inverse(found) if inverted else found

    def _character(self, *, wide: bool = False) -> Ranges:
        """Returns the code of a character, or all characters of a class such as "d" after a backslash.

        ECMA's and Unicode's definitions of a class differ. With `wide`, the result has the characters in any of the
        definitions, otherwise only the characters in all of them.
        """
        if not self._peek():
            raise self._refusal("'[' without ']'", r"a bracket that closes it, or '\['")
        char = self._peek()
        self._place += 1
        if char != "\\":
            return [(ord(char), ord(char))]
        name = self._peek()
        if number := _HEX.match(self._text, self._place):
            code = int(number[1] or number[2] or number[3], 16)
            if code <= LAST:
                self._place = number.end()
                return [(code, code)]
            raise self._refusal(repr(f"\\{number[0]}"), f"a code up to {LAST:x}")
        if not name:
            raise self._refusal(repr("\\"), "a character after it")
        if name.isalnum() and name.lower() not in CLASSES and name not in CONTROLS:
            expected = next((f"no {what}" for names, what in ESCAPES.items() if name in names), "")
            expected = "two hexadecimal digits after x, or four after u" if name in ("x", "u") else expected
            raise self._refusal(repr(f"\\{name}"), expected)
        self._place += 1
        if name.lower() in CLASSES:
            found = _all_of(name.lower()) if wide == name.islower() else CLASSES[name.lower()]
            return found if name.islower() else inverse(found)
        code = CONTROLS.get(name, ord(name))
        return [(code, code)]


@functools.cache
def _all_of(name: str) -> Ranges:
    """Returns the characters of a class by ECMA's or by Unicode's definition, which `re` and other validators use."""
    more = "\ufeff" if name == "s" else ""  # only in ECMA's definition
    found = re.finditer(rf"[\{name}{more}]+", "".join(map(chr, range(LAST + 1))))
    return [(each.start(), each.end() - 1) for each in found]


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


KNOWN = r"characters, classes such as [a-z] and \d, groups, |, * + ? {2,3}, and ^ and $ around all of an alternative"
