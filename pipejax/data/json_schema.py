"""Flat JSON schemas: each property of an object as the texts that a row may be, and the value that such a text means.

A row is the text of its value, without quotes, and may begin with a space. The items of a list are parted by commas.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pipejax.data import patterns
from pipejax.data.expressions import Expressions
from pipejax.data.lines import Object
from pipejax.system.errors import UserError
from pipejax.system.fields import shown

SAY_NOTHING = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
TYPES = ("string", "integer", "number", "boolean", "null", "array")
CONTROLS = ((0x0, 0x1F), (0x7F, 0x7F))
DIGITS = 18  # of a whole number, at the most: it fits into 64 bits
LARGEST = 10**DIGITS - 1
HUGE = 1e300  # bounds are less
NUMBER = rf"^-?(0|[1-9]\d{{0,{DIGITS - 1}}})(\.\d{{1,17}})?([eE][+-]?\d\d?)?$"  # a finite double, whatever its digits
_DAY = r"(0[1-9]|1\d|2[0-8])"
_LEAP = r"([12]\d(0[48]|[2468][048]|[13579][26])|(12|16|20|24|28)00)"
_DATE = rf"([12]\d{{3}}-((0[13578]|1[02])-({_DAY}|29|30|31)|(0[469]|11)-({_DAY}|29|30)|02-{_DAY})|{_LEAP}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": r"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,18}$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
}


class Texts(NamedTuple):
    """The texts of a value."""

    expression: int
    read: Callable[[str], object]  # the value that one of them means
    literals: tuple[str, ...] = ()  # those that the schema spells out


def read_properties(schema: object, made: Expressions, where: str, *, longest: int) -> dict[str, Texts]:
    """The texts of each property of an object, by name and in the schema's order."""
    found = _known(schema, where, "properties", "required", "additionalProperties", "$schema", "$id")
    kind, properties, required = found.get("type"), found.get("properties"), found.get("required", [])
    if kind != "object":
        raise _refusal(f"{where}: type", kind, '"object"')
    if not isinstance(properties, Mapping) or not properties:
        raise _refusal(f"{where}: properties", properties, "an object of one property at least, each a row")
    if not isinstance(required, list) or (absent := [name for name in required if name not in [*properties]]):
        raise _refusal(f"{where}: required", required, f"names of properties{f', not {absent}' if required else ''}")
    if any(not name.strip() for name in properties):
        raise _refusal(f"{where}: properties", "an empty name", "names with which rows can begin")
    reader = _Reader(made, longest)
    return {name: reader.row(one, f"{where}: properties.{name}") for name, one in properties.items()}


class _Reader:
    def __init__(self, made: Expressions, longest: int) -> None:
        self._made, self._longest = made, longest
        self._free = made.characters(patterns.inverse(CONTROLS))
        self._any = made.characters(patterns.inverse(()))

    def row(self, given: object, where: str) -> Texts:
        """The texts of a property's value, with a space before them or without."""
        found = self._list(given, where) if _kind(given) == "array" else self._single(given, where)
        own = self._made.not_first(found.expression, " ")
        spaced = self._made.join(self._made.either(self._made.empty, self._made.text(" ")), own)
        return found._replace(expression=spaced, read=lambda text: found.read(text.removeprefix(" ")))

    def _single(self, given: object, where: str) -> Texts:
        schema, nullable = _part_from_null(given, where)
        if "enum" in schema or "const" in schema:
            return self._literals(schema, where, nullable)
        kind = schema.get("type")
        if kind == "null":
            return self._spelled([None])
        if kind == "boolean":
            _known(schema, where)
            found = self._spelled([True, False])
        elif kind == "integer":
            found = Texts(self._integer(schema, where), json.loads)
        elif kind == "number":
            found = Texts(self._number(schema, where), json.loads)
        elif kind == "string":
            found = Texts(self._string(schema, where), str)
        else:
            raise _refusal(f"{where}: type", kind, f"one of {', '.join(TYPES)}, since a row is one value or a list")
        if not nullable:
            return found
        null = self._spelled([None])
        expression = self._made.either(found.expression, null.expression)
        return found._replace(expression=expression, read=lambda text: None if text == "null" else found.read(text))

    def _spelled(self, values: Sequence[object]) -> Texts:
        """Values that the schema spells out; of two that have the same text the first."""
        texts = {_text(value): value for value in reversed(values)}
        expression = self._made.either(*(self._made.text(text) for text in texts))
        return Texts(expression, texts.__getitem__, (*reversed(texts),))

    def _literals(self, schema: Object, where: str, nullable: bool) -> Texts:
        _known(schema, where, "enum", "const")
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            raise _refusal(f"{where}: enum", values, "a list of values")
        if "const" in schema and "enum" in schema:
            raise _refusal(f"{where}: const", schema["const"], "none beside enum")
        for value in values:
            text, kind = _text(value), schema.get("type")
            is_null = value is None and (nullable or kind is None)
            if not is_null and not _is_of(value, kind):
                raise _refusal(f"{where}: enum", value, f"values of type {kind or 'that a row can be'}")
            if text.startswith(" "):
                raise _refusal(f"{where}: enum", value, "no space at its beginning, where rows have one anyway")
        return self._spelled(values)

    def _integer(self, schema: Object, where: str) -> int:
        _known(schema, where, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        low = max(math.ceil(_number(schema, "minimum", -LARGEST, where)), -LARGEST)
        low = max(low, math.floor(_number(schema, "exclusiveMinimum", low - 1, where)) + 1)
        high = min(math.floor(_number(schema, "maximum", LARGEST, where)), LARGEST)
        high = min(high, math.ceil(_number(schema, "exclusiveMaximum", high + 1, where)) - 1)
        if low > high:
            raise UserError(f"{where}: found no whole number from {low} to {high}; expected one of {DIGITS} digits")
        return self._made.whole_numbers(low, high)

    def _number(self, schema: Object, where: str) -> int:
        _known(schema, where, "minimum")
        if _number(schema, "minimum", 0, where) != 0:
            raise _refusal(f"{where}: minimum", schema["minimum"], "0 or none, since others bound integers alone")
        found = patterns.read(NUMBER, self._made, where)
        return self._made.not_first(found, "-") if "minimum" in schema else found

    def _string(self, schema: Object, where: str) -> int:
        _known(schema, where, "minLength", "maxLength", "pattern", "format")
        least, most = self._bounds(schema, "Length", where)
        conditions = list[int]()
        if "pattern" in schema:
            conditions.append(patterns.read(_str(schema, "pattern", where), self._made, f"{where}: pattern"))
        if "format" in schema:
            if (name := _str(schema, "format", where)) not in FORMATS:
                raise _refusal(f"{where}: format", name, f"one of {', '.join(FORMATS)}")
            conditions.append(patterns.read(FORMATS[name], self._made, where))
        character = self._any if conditions else self._free
        return self._made.both(*conditions, self._made.repeat(character, least, most))

    def _list(self, given: object, where: str) -> Texts:
        schema = _known(given, where, "items", "minItems", "maxItems")
        least, most = self._bounds(schema, "Items", where)
        if _kind(schema.get("items")) == "array":
            raise _refusal(f"{where}: items", schema["items"], "values that are no lists, since a row has one list")
        item = self._single(schema.get("items"), f"{where}: items")
        if commas := [text for text in item.literals if "," in text or not text]:
            raise _refusal(f"{where}: items", commas[0], "texts without a comma, which parts them")
        made = self._made
        one = made.not_empty(made.not_first(made.without(item.expression, ","), " "))
        more = made.join(made.text(","), made.either(made.empty, made.text(" ")), one)
        several = made.join(one, made.repeat(more, max(least - 1, 0), None if most is None else max(most - 1, 0)))
        several = made.empty if most == 0 else several
        expression = made.either(made.empty, several) if least == 0 else several
        return Texts(
            expression, lambda text: [item.read(x.removeprefix(" ")) for x in text.split(",") if text], item.literals
        )

    def _bounds(self, schema: Object, of: str, where: str) -> tuple[int, int | None]:
        bounds = [schema.get(f"min{of}", 0), schema.get(f"max{of}")]
        for name, value in zip((f"min{of}", f"max{of}"), bounds, strict=True):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise _refusal(f"{where}: {name}", value, "a whole number from 0 on")
        least, most = bounds
        assert isinstance(least, int) and (most is None or isinstance(most, int))
        if most is not None and most < least:
            raise _refusal(f"{where}: max{of}", most, f"at least min{of} = {least}")
        if least > self._longest:
            raise _refusal(
                f"{where}: min{of}", least, f"at most {self._longest}, as a row has no more under grid.time_max"
            )
        return least, None if most is None or most > self._longest else most


def _kind(schema: object) -> object:
    return schema.get("type") if isinstance(schema, Mapping) else None


def _known(given: object, where: str, *names: str) -> Object:
    """The schema, if it is an object of keys that have those names, or are not needed."""
    if not isinstance(given, Mapping):
        raise _refusal(where, given, "a schema, which is an object")
    for key in given:
        if key not in ("type", *names, *SAY_NOTHING):
            kind = f" beside type {given['type']}" if isinstance(given.get("type"), str) else ""
            raise _refusal(where, f"{key}", f"none but {', '.join(('type', *names))}{kind}, which rows can follow")
    return given


def _part_from_null(given: object, where: str) -> tuple[Object, bool]:
    """The schema without null, and whether that was among its types; as pydantic writes unions, too."""
    if not isinstance(given, Mapping):
        raise _refusal(where, given, "a schema, which is an object")
    several = given.get("anyOf")
    if isinstance(several, list):
        others = [one for one in several if _kind(one) != "null"]
        rest = {key: value for key, value in given.items() if key != "anyOf"}
        if len(others) == 1 and len(several) == 2 and isinstance(others[0], Mapping) and {*rest} <= {*SAY_NOTHING}:
            one = {key: value for key, value in others[0].items() if key != "const"}
            if "const" in others[0] and "enum" not in one:
                one["enum"] = [others[0]["const"]]
            if isinstance(values := one.get("enum"), list):
                one["enum"] = [*values, None]
            return one, True
        raise _refusal(f"{where}: anyOf", several, "none, or a schema and null")
    kinds = given.get("type")
    if not isinstance(kinds, list):
        return given, False
    others = [kind for kind in kinds if kind != "null"]
    if len(others) > 1 or not kinds:
        raise _refusal(f"{where}: type", kinds, "one type, with null or without")
    return {**given, "type": others[0] if others else "null"}, len(others) < len(kinds)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_of(value: object, kind: object) -> bool:
    """Whether a row can be the value, and it is of that type; None: of any."""
    if isinstance(value, bool) or value is None:
        return kind in (None, "null" if value is None else "boolean")
    if isinstance(value, str):
        return kind in (None, "string")
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, int | float) and kind in (None, "number", *(("integer",) if is_whole else ()))


def _number(schema: Object, name: str, default: int, where: str) -> float:
    value = schema.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < HUGE:
        raise _refusal(f"{where}: {name}", value, "a number")
    return value


def _str(schema: Object, name: str, where: str) -> str:
    value = schema[name]
    if not isinstance(value, str):
        raise _refusal(f"{where}: {name}", value, "a text")
    return value


def _refusal(where: str, found: object, expected: str) -> UserError:
    return UserError(f"{where}: found {shown(found)}; expected {expected}")
