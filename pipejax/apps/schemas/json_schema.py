"""Reads flat JSON schemas: for each property of an object, the valid texts of a row, and the value of each text.

A row is the text of its value, without quotes; it may begin with a space. The items of a list are separated by commas.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from pipejax.apps.schemas import patterns
from pipejax.apps.schemas.expressions import Expressions, TooLarge
from pipejax.data.lines import Object
from pipejax.system import strict_json
from pipejax.system.errors import UserError, did_you_mean, in_parentheses
from pipejax.system.fields import named, shown_value
from pipejax.system.strict_json import JsonMapping

SAY_NOTHING = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
TYPES = ("string", "integer", "number", "boolean", "null", "array")
OF_OBJECTS: dict[str, tuple[Any, str]] = {  # keys of the whole schema, the type of their values, and that type in words
    "properties": (Mapping, "an object of schemas, each of a row"),
    "required": (list, "a list of names of properties"),
    "additionalProperties": (bool | Mapping, "true, false or a schema"),
    **dict.fromkeys(("$defs", "definitions"), (Mapping, "an object of schemas")),
    **dict.fromkeys(("$schema", "$id"), (str, "a text")),
}
CONTROLS = ((0x0, 0x1F), (0x7F, 0x7F))
DIGITS = 18  # the most digits of a whole number, so that it fits into 64 bits
LARGEST = 10**DIGITS - 1
HUGE = 1e300  # bounds of numbers must be smaller
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
REFERENCES = 32  # the longest chain of references
_INDEX = re.compile("0|[1-9][0-9]{0,8}")  # the index of an item in a JSON pointer
NUMBER = rf"^-?(0|[1-9]\d{{0,{DIGITS - 1}}})(\.\d{{1,17}})?([eE][+-]?\d\d?)?$"  # a finite double with any digits
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
    """The valid texts of a value, as an expression, with a function that reads them."""

    expression: int
    read: Callable[[str], object]  # returns the value of a text
    literals: tuple[str, ...] = ()  # the texts that the schema lists


def read_properties(schema: object, made: Expressions, where: str, *, longest: int, most: int) -> dict[str, Texts]:
    """Returns the valid texts of each property of an object schema, by name and in the schema's order.

    Args:
      schema: the schema.
      made: creates the expressions.
      where: the schema's name, for messages.
      longest: the most characters of a name.
      most: the most properties.

    Raises:
      UserError: the schema is invalid, not flat, or has an unsupported keyword.
      TooLarge: an expression needs too much work.
    """
    reader = _SchemaReader(made, longest, schema)
    found: JsonMapping = _known(reader.follow(schema, where), where, *OF_OBJECTS)
    if "type" not in found:
        raise UserError(where, found="no type", expected='"type": "object"')
    if found["type"] != "object":
        raise _schema_refusal(f"{where}: type", found["type"], '"object"')
    for key, (kind, expected) in OF_OBJECTS.items():
        if key in found and not isinstance(found[key], kind):
            raise _schema_refusal(f"{where}: {key}", found[key], expected)
    properties, required = found.get("properties"), found.get("required", [])
    if properties is None:
        raise UserError(where, found="no properties", expected=f"{OF_OBJECTS['properties'][1]}")
    if not properties:
        raise _schema_refusal(f"{where}: properties", properties, "at least one property; each is a row")
    if len(properties) > most:
        raise UserError(
            f"{where}: properties",
            found=f"{len(properties)}",
            expected=f"at most {most}, the most rows that an answer can have",
        )
    if others := [name for name in required if not isinstance(name, str)]:
        raise _schema_refusal(f"{where}: required", others[0], "texts, the names of properties")
    if absent := [name for name in required if name not in properties]:
        raise _schema_refusal(f"{where}: required", absent[0], "names that are in properties")
    if any(not name.strip() for name in properties):
        raise UserError(
            f"{where}: properties",
            found="a blank name",
            expected="names that are not blank, since rows begin with them",
        )
    if long := [name for name in properties if len(name) > longest]:
        raise _schema_refusal(
            f"{where}: properties", long[0], f"names of at most {longest} characters, since rows begin with them"
        )
    rows = dict[str, Texts]()
    for name, one in properties.items():
        try:
            rows[name] = reader.row(one, f"{where}: properties.{named(name)}")
        except TooLarge as error:
            raise TooLarge(str(error), f"properties.{named(name)}") from error
    return rows


def equal(one: object, other: object) -> bool:
    """Returns whether two values are equal in JSON Schema: 1 equals 1.0, but true equals no number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return one == other


class _SchemaReader:
    """Reads the schemas of single properties."""

    def __init__(self, made: Expressions, longest: int, root: object) -> None:
        self._made, self._longest, self._root = made, longest, root
        self._free = made.characters(patterns.inverse(CONTROLS))
        self._any = made.characters(patterns.inverse(()))

    def row(self, given: object, where: str) -> Texts:
        """Returns the valid texts of a property: a list or a single value, with an optional leading space."""
        schema = self.follow(given, where)
        is_list = schema.get("type") in ("array", ["array"])
        found = self._list(schema, where) if is_list else self._single(schema, where, "together with null")
        own = self._made.not_first(found.expression, " ")
        spaced = self._made.join(self._made.either(self._made.empty, self._made.text(" ")), own)
        return found._replace(expression=spaced, read=lambda text: found.read(text.removeprefix(" ")))

    def follow(self, given: object, where: str) -> Object:
        """Returns the schema merged with the one that it refers to, by `$ref` or as the only one of `allOf`."""
        followed = set[str]()
        for _ in range(REFERENCES + 1):
            if not isinstance(given, Mapping):
                raise _schema_refusal(where, given, "a schema, which is an object")
            key = "$ref" if "$ref" in given else "allOf"
            if key not in given:
                return given
            target, rest = given[key], {name: value for name, value in given.items() if name != key}
            if key == "allOf":
                if not isinstance(target, list):
                    raise _schema_refusal(f"{where}: allOf", target, "a list of one schema")
                if len(target) != 1:
                    raise UserError(f"{where}: allOf", found=f"{len(target)} schemas", expected="one schema")
                other = target[0]
            else:
                other = self._target(target, where)
                if target in followed:
                    raise _schema_refusal(f"{where}: $ref", target, "a reference that does not lead back to itself")
                followed.add(target)
            if not isinstance(other, Mapping):
                referred = f"{shown_value(target)}, which refers to " if key == "$ref" else ""
                raise UserError(
                    f"{where}: {key}", found=f"{referred}{shown_value(other)}", expected="a schema, which is an object"
                )
            both = {*rest} & {*other} - {*SAY_NOTHING}
            if twice := [name for name in other if name in both and not equal(other[name], rest[name])]:
                raise _schema_refusal(
                    f"{where}: {named(twice[0])}", rest[twice[0]], f"{shown_value(other[twice[0]])}, as in {key}"
                )
            given = {**other, **rest}
        raise _schema_refusal(f"{where}: $ref", target, f"a chain of at most {REFERENCES} references")

    def _target(self, reference: object, where: str) -> object:
        """Returns the part of the whole schema that a reference names by the JSON pointer in its fragment."""
        example = '"#/$defs/Color"'
        if not isinstance(reference, str):
            raise _schema_refusal(f"{where}: $ref", reference, f"a text such as {example}")
        place, _, pointer = reference.partition("#")
        first, *names = unquote(pointer).split("/")
        if place:
            raise _schema_refusal(
                f"{where}: $ref", reference, f"a place in this schema, such as {example}; other documents are not read"
            )
        if first:
            raise _schema_refusal(
                f"{where}: $ref", reference, f"a JSON pointer such as {example}; anchors are not supported"
            )
        found = self._root
        for depth, name in enumerate(name.replace("~1", "/").replace("~0", "~") for name in names):
            if isinstance(found, Mapping) and name in found:
                found = found[name]
                continue
            if isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
                found = found[int(name)]
                continue
            if isinstance(found, Mapping):
                lacks = f"has no {named(name)}"
            elif isinstance(found, list):
                lacks = f"is a list of {len(found)}, without {named(name)}"
            else:
                lacks = "is neither an object nor a list"
            above = named("/".join(("#", *names[:depth])))
            raise _schema_refusal(f"{where}: $ref", reference, f"a place in this schema; {above} {lacks}")
        return found

    def _single(self, given: object, where: str, within: str, depth: int = 0) -> Texts:
        """Returns the valid texts of a single value.

        Args:
          given: the schema of the value.
          where: its place, for messages.
          within: the reason why a list is not allowed here, for messages.
          depth: the number of enclosing unions.
        """
        schema = self.follow(given, where)
        if "anyOf" in schema:
            if depth == REFERENCES:
                raise UserError(
                    f"{where}: anyOf", found=f"{depth} nested unions", expected="a union that does not refer to itself"
                )
            return self._or_null(self._single(self._beside_null(schema, where), where, within, depth + 1))
        kind, nullable = _part_from_null(schema, where)
        if "type" in schema:
            _check_type(kind, schema["type"], where, within)
        if "enum" in schema or "const" in schema:
            return self._literals(schema, where, kind, nullable)
        if kind in ("null", "boolean"):
            _known(schema, where)
            found = self._spelled([None] if kind == "null" else [True, False])
        elif kind == "integer":
            found = Texts(self._integer(schema, where), strict_json.loads)
        elif kind == "number":
            found = Texts(self._number(schema, where), strict_json.loads)
        elif kind == "string":
            found = Texts(self._string(schema, where), str)
        else:
            raise UserError(where, found="no type", expected=f"one of {', '.join(TYPES)}, or enum or const")
        return self._or_null(found) if nullable else found

    def _or_null(self, found: Texts) -> Texts:
        expression = self._made.either(found.expression, self._made.text("null"))
        return found._replace(expression=expression, read=lambda text: None if text == "null" else found.read(text))

    def _beside_null(self, schema: Object, where: str) -> Object:
        """Returns the schema that forms a union with null, in the way that pydantic writes it."""
        several = schema["anyOf"]
        if others := [key for key in schema if key not in ("anyOf", *SAY_NOTHING)]:
            raise _schema_refusal(where, others[0], "no other key together with anyOf")
        if not isinstance(several, list):
            raise _schema_refusal(f"{where}: anyOf", several, "a list of a schema and null")
        if len(several) != 2:
            raise UserError(f"{where}: anyOf", found=f"{len(several)} schemas", expected="a schema and null")
        members = [self.follow(one, where) for one in several]
        null, other = sorted(members, key=lambda one: one.get("type") != "null")
        if null.get("type") != "null":
            raise _schema_refusal(f"{where}: anyOf", several, "a schema and null, since a row follows one schema")
        if other.get("type") == "null":
            raise _schema_refusal(f"{where}: anyOf", several, "a schema and null")
        _known(null, f"{where}: anyOf")
        return other

    def _spelled(self, values: Sequence[object]) -> Texts:
        texts = {_text_of(value): value for value in reversed(values)}
        expression = self._made.either(*(self._made.text(text) for text in texts))
        return Texts(expression, texts.__getitem__, (*reversed(texts),))

    def _literals(self, schema: Object, where: str, kind: object, nullable: bool) -> Texts:
        """Returns the texts of `enum` or `const`."""
        _known(schema, where, "enum", "const")
        key = "enum" if "enum" in schema else "const"
        values = schema["enum"] if key == "enum" else [schema["const"]]
        if not isinstance(values, list):
            raise _schema_refusal(f"{where}: enum", values, "a list of values")
        if not values:
            raise _schema_refusal(f"{where}: enum", values, "at least one value")
        if "const" in schema and "enum" in schema:
            raise _schema_refusal(f"{where}: const", schema["const"], "no const together with enum")
        for value in values:
            if isinstance(value, list | Mapping):
                raise _schema_refusal(f"{where}: {key}", value, "texts, numbers, true, false or null")
            is_null = value is None and (nullable or kind is None)
            if not is_null and not _is_of(value, kind):
                raise _schema_refusal(f"{where}: {key}", value, f"values of type {kind}")
            if _text_of(value).startswith(" "):
                raise _schema_refusal(f"{where}: {key}", value, "a text without a leading space")
        return self._spelled(values)

    def _integer(self, schema: Object, where: str) -> int:
        """Returns the whole numbers within the schema's bounds."""
        _known(schema, where, *_LOWER, *_UPPER)
        low = math.ceil(_number_of(schema, "minimum", -LARGEST, where))
        low = max(low, math.floor(_number_of(schema, "exclusiveMinimum", low - 1, where)) + 1)
        high = math.floor(_number_of(schema, "maximum", LARGEST, where))
        high = min(high, math.ceil(_number_of(schema, "exclusiveMaximum", high + 1, where)) - 1)
        bounds = f"whole numbers from {shown_value(low)} to {shown_value(high)}"
        if low > high and not schema.keys().isdisjoint(_LOWER) and not schema.keys().isdisjoint(_UPPER):
            raise UserError(where, found=f"{bounds}, an empty range", expected="bounds that allow at least one number")
        low, high = max(low, -LARGEST), min(high, LARGEST)
        if low > high:
            raise UserError(where, found=f"{bounds}", expected=f"bounds of at most {DIGITS} digits")
        return self._made.whole_numbers(low, high)

    def _number(self, schema: Object, where: str) -> int:
        _known(schema, where, "minimum")
        if _number_of(schema, "minimum", 0, where) != 0:
            raise _schema_refusal(
                f"{where}: minimum", schema["minimum"], "0 or none, since only integers support other bounds"
            )
        found = patterns.read_pattern(NUMBER, self._made, where)
        return self._made.not_first(found, "-") if "minimum" in schema else found

    def _string(self, schema: Object, where: str) -> int:
        """Returns the texts of a string schema, restricted by its length, pattern and format."""
        _known(schema, where, "minLength", "maxLength", "pattern", "format")
        least, most = self._bounds(schema, "Length", where)
        conditions = list[int]()
        if "pattern" in schema:
            conditions.append(patterns.read_pattern(_str(schema, "pattern", where), self._made, f"{where}: pattern"))
        if "format" in schema:
            if (name := _str(schema, "format", where)) not in FORMATS:
                raise _schema_refusal(f"{where}: format", name, f"one of {', '.join(FORMATS)}")
            conditions.append(patterns.read_pattern(FORMATS[name], self._made, where))
        character = self._any if conditions else self._free
        return self._made.both(*conditions, self._made.repeat(character, least, most))

    def _list(self, given: object, where: str) -> Texts:
        """Returns the lists of items, separated by a comma and an optional space."""
        schema = _known(given, where, "items", "minItems", "maxItems")
        least, most = self._bounds(schema, "Items", where)
        if "items" not in schema:
            raise UserError(where, found="no items", expected="a schema of the items")
        item = self._single(schema["items"], f"{where}: items", "in a list")
        if "" in item.literals:
            raise _schema_refusal(f"{where}: items", "", "texts of at least one character")
        if commas := [text for text in item.literals if "," in text]:
            raise _schema_refusal(f"{where}: items", commas[0], "texts without a comma, which separates items")
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
        """Returns the values of `minItems` and `maxItems`, or of `minLength` and `maxLength`.

        The upper bound is None if it is absent, or too large to matter.
        """
        bounds = list[int | None]()
        for name in (f"min{of}", f"max{of}"):
            value = schema.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
                raise _schema_refusal(f"{where}: {name}", value, "a whole number of at least 0")
            bounds.append(int(value) if name in schema else None)
        least, most = bounds[0] or 0, bounds[1]
        if most is not None and most < least:
            raise _schema_refusal(f"{where}: max{of}", most, f"at least min{of} = {least}")
        if least > self._longest:
            raise _schema_refusal(
                f"{where}: min{of}", least, f"at most {self._longest}, the most that grid.time_max allows in a row"
            )
        return least, None if most is None or most > self._longest else most


def _known(given: object, where: str, *names: str) -> Object:
    """Returns the schema if it is an object whose keys are among `names` or have no effect.

    Raises:
      UserError: the schema is not an object, or has another key.
    """
    if not isinstance(given, Mapping):
        raise _schema_refusal(where, given, "a schema, which is an object")
    for key in given:
        if key not in ("type", *names, *SAY_NOTHING):
            kind = f" with type {named(given['type'])}" if isinstance(given.get("type"), str) else ""
            known = ", ".join(("type", *names))
            raise _schema_refusal(where, key, f"one of {known}, the keys that are supported{kind}")
    return given


def _part_from_null(schema: Object, where: str) -> tuple[object, bool]:
    """Returns the type without null, and whether null was allowed."""
    kinds = schema.get("type")
    if not isinstance(kinds, list):
        return kinds, False
    if not kinds:
        raise _schema_refusal(f"{where}: type", kinds, "at least one type")
    others = [kind for kind in kinds if kind != "null"]
    if len(others) > 1:
        raise _schema_refusal(f"{where}: type", kinds, "one type, alone or with null")
    return (others[0], len(kinds) > 1) if others else ("null", False)


def _check_type(kind: object, given: object, where: str, within: str) -> None:
    """Raises a UserError unless the type is one of a single value."""
    if kind == "array":
        raise _schema_refusal(f"{where}: type", given, f"no list {within}")
    if kind == "object":
        raise _schema_refusal(f"{where}: type", given, "no object, since a row is a single value or a list")
    if kind not in TYPES:
        raise _schema_refusal(
            f"{where}: type", given, f"one of {', '.join(TYPES)}{in_parentheses(did_you_mean(kind, TYPES))}"
        )


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_of(value: object, kind: object) -> bool:
    if isinstance(value, bool) or value is None:
        return kind in (None, "null" if value is None else "boolean")
    if isinstance(value, str):
        return kind in (None, "string")
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, int | float) and kind in (None, "number", *(("integer",) if is_whole else ()))


def _number_of(schema: Object, name: str, default: int, where: str) -> float:
    value = schema.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _schema_refusal(f"{where}: {name}", value, "a number")
    if not abs(value) < HUGE:
        raise _schema_refusal(f"{where}: {name}", value, f"a number between {-HUGE:g} and {HUGE:g}")
    return value


def _str(schema: Object, name: str, where: str) -> str:
    value = schema[name]
    if not isinstance(value, str):
        raise _schema_refusal(f"{where}: {name}", value, "a text")
    return value


def _schema_refusal(where: str, found: object, expected: str) -> UserError:
    return UserError(where, found=shown_value(found), expected=expected)
