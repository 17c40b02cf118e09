"""Dataclasses of settings: legal ranges of fields, checks of types and ranges, and values parsed from text.

The module needs only the standard library.
"""

import contextlib
import dataclasses
import json
import math
import operator
import os
import reprlib
import types
import typing
from collections.abc import Iterable
from typing import Any

from pipejax.system import strict_json
from pipejax.system.errors import UserError, did_you_mean
from pipejax.system.files import UTF_8, is_misread

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Section = typing.TypeVar("_Section", bound="DataclassInstance")

Kind = Any  # the annotated type of a setting: a class, a union of classes, or one of SEQUENCES
TEXTS = tuple[str, ...]  # the type of a setting with several texts
IDS = tuple[int, ...]  # the type of a setting with several token ids
NAMES = str | TEXTS  # the type of a setting with one name or several
SEQUENCES = {TEXTS: str, IDS: int, NAMES: str}  # types of settings that may be tuples, with the type of each element
WHOLE = 2**31 - 1  # the largest whole number of a setting, because arrays count in 32 bits
# The commands that open a checkpoint and have --set; "decode": all commands that decode with `inference.load`.
Command = typing.Literal["decode", "export", "probe", "teach"]
# "tokens": a record may have other tokens; "text": the same tokens, but another text; "trace": another trace alone.
Effect = typing.Literal["tokens", "text", "trace", "none"]


class Facts(typing.TypedDict, total=False):
    """The declaration of a setting in addition to its type and default: legal values, and where it may be set.

    The facts of a section apply to each of its keys that does not declare another value.
    """

    least: float  # the smallest legal number
    most: float  # the largest legal number
    above: float  # an exclusive lower limit
    below: float  # an exclusive upper limit
    choices: tuple[str, ...]  # the legal texts
    classes: bool  # whether MODULE:CLASS is legal, too
    untold: tuple[str, ...]  # legal texts that messages do not list
    keeps_spaces: bool  # whether --set keeps spaces at the ends of the value
    # The commands whose --set may change the value of a checkpoint; `pipejax train` sets every key.
    commands: tuple[Command, ...]
    with_weights: bool  # whether the setting is read with the weights, so that no call of a `Generator` can change it
    request: bool | tuple[int, int]  # whether a request may send the setting in the same range; a tuple: in this range
    # Whether a resumed run may change the setting; a tuple: if the fingerprints with these names are unchanged.
    resume: bool | tuple[str, ...]
    records: Effect  # the effect of the setting on a record
    read_by: str  # the only method of pipejax that reads the setting
    ability: str  # the ability without which a method does not read the setting, a key of `methods.ABILITIES`
    asks: bool  # whether a value other than the default is an error, and not ignored, without the ability
    exported: bool  # whether exported programs support values other than the default
    # Whether the value is a number of updates, which `pipejax teach` divides because its updates are larger.
    per_update: bool


def setting(default: Any = dataclasses.MISSING, **facts: typing.Unpack[Facts]) -> Any:
    """Returns a dataclass field with its legal values and the other `Facts` of a setting.

    A limit gives an error message where a large value would otherwise cause an allocation that ends the process.

    Args:
      default: the default value.
      facts: see `Facts`.
    """
    return dataclasses.field(default=default, metadata=facts)


def section(cls: type, **facts: typing.Unpack[Facts]) -> Any:
    """Returns a dataclass field for a section, an object of the dataclass `cls`, with the `Facts` of its keys."""
    return dataclasses.field(default_factory=cls, metadata=facts)


def facts_of(cls: type) -> dict[str, Facts]:
    """Returns the facts of each setting of a dataclass and of its sections, by dotted key, in order."""
    found = dict[str, Facts]()
    for field in dataclasses.fields(cls):
        own = typing.cast(Facts, dict(field.metadata))
        if dataclasses.is_dataclass(made := field.default_factory):
            found |= {f"{field.name}.{key}": {**own, **inner} for key, inner in facts_of(made).items()}
        else:
            found[field.name] = own
    return found


def check_settings(node: Any, prefix: str, where: str) -> None:
    """Checks the types and ranges of a dataclass's fields, also in nested dataclasses.

    Raises:
      UserError: a value is invalid.
    """
    kinds = types_of(type(node))
    for field in dataclasses.fields(node):
        key, value, kind = prefix + field.name, getattr(node, field.name), kinds[field.name]
        classes = tuple(k for k in alternatives(kind) if isinstance(k, type))
        nests = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if nests and isinstance(value, object if kind is Any else classes):
            check_settings(value, f"{key}.", where)
            continue
        if kind is Any:  # checked where the value is used
            continue
        # In Python a bool is an int, but a setting of type int or float must not be a bool; a float may be given as an
        # int.
        fits = type(value) in alternatives(kind) or (kind is float and type(value) is int)
        texts = value if isinstance(value, tuple) else (value,)
        if (of := SEQUENCES.get(kind)) and (kind != NAMES or isinstance(value, tuple)):
            fits = isinstance(value, tuple) and all(type(one) is of for one in value)
        # The number is too large for a float and, if it is longer still, for conversion to text.
        if type(value) is int and abs(value) > 10**30:
            raise UserError(f"{where}: {key}", found="a number of more than 30 digits", expected=noun(kind))
        if not fits or (kind is float and not math.isfinite(value)):
            raise UserError(f"{where}: {key}", found=shown_value(value), expected=noun(kind))
        if any("\ud800" <= character <= "\udfff" for text in texts if isinstance(text, str) for character in text):
            misread = any(map(is_misread, texts))
            raise UserError(f"{where}: {key}", found=f"{value!r}", expected=f"{UTF_8 if misread else 'valid Unicode'}")
        rule = field.metadata
        is_class = rule.get("classes") and all(value.partition(":"))
        if rule.get("choices") and value not in rule["choices"] and not is_class:
            told = [choice for choice in rule["choices"] if choice and choice not in rule.get("untold", ())]
            more = " or MODULE:CLASS" if rule.get("classes") else ""
            raise UserError(
                f"{where}: {key}",
                found=f"{value!r}",
                expected=f"one of {', '.join(told)}{more}",
                hint=did_you_mean(value, told),
            )
        for name, words, broken in (
            ("least", "at least", operator.lt),
            ("most", "at most", operator.gt),
            ("above", "more than", operator.le),
            ("below", "less than", operator.ge),
        ):
            bound = rule.get(name)
            if name == "most" and bound is None and kind is int:
                bound = WHOLE
            if bound is not None and broken(value, bound):
                raise UserError(f"{where}: {key}", found=f"{value}", expected=f"{words} {bound}")


def shown_value(value: object) -> str:
    """Returns a value of any type in one line of at most 100 characters; of large values only the beginning is read."""
    text = " ".join(_short.repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def named(text: str) -> str:
    """Returns an untrusted name for a line: unchanged if it is short and visible, else quoted and cut."""
    return text if text.isprintable() and len(text) <= 60 else shown_value(text)


def listed(names: Iterable[object], most: int = 200) -> str:
    """Joins names by commas; of many names only the first, up to about `most` characters."""
    shown, length, rest = list[str](), 0, iter(names)
    for name in rest:
        shown.append(named(str(name)))
        length += len(shown[-1]) + 2
        if length > most:
            break
    others = sum(1 for _ in rest)
    return ", ".join(shown) + (f" and {others} others" if others else "")


_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxlong, _short.maxother = 6, 100, 100, 100
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 50


def types_of(cls: type) -> dict[str, Kind]:
    """Returns the type of each field of a dataclass, by name."""
    return typing.get_type_hints(cls)


def alternatives(kind: Kind) -> tuple[Kind, ...]:
    """Returns the members of a union, or the type itself."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def noun(kind: Kind) -> str:
    """Describes a type in words, for messages."""
    nouns = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        list: "a list",
        dict: "an object",
        TEXTS: 'a list of texts, such as ["date:", "party:"]',
        IDS: "a list of whole numbers, such as [107]",
        NAMES: 'a name, or several such as ["date", "party"]',
    }
    return nouns.get(kind) or " or ".join(getattr(k, "__name__", str(k)) for k in alternatives(kind))


def plain_value(value: object, kind: Kind) -> object:
    """Converts a value from Python to the form of settings of that type.

    Numbers of NumPy, paths and lists become plain numbers, texts and tuples.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    value = os.fspath(value) if kind is str and isinstance(value, os.PathLike) else value
    return tuple(value) if kind in SEQUENCES and isinstance(value, list) else value


def with_tuples(node: _Section) -> _Section:
    """Replaces lists by tuples, also in nested dataclasses, so that settings can be hashed."""
    changed, kinds = dict[str, Any](), types_of(type(node))
    for field in dataclasses.fields(node):
        value = plain = getattr(node, field.name)
        origins: list[Any] = [typing.get_origin(kind) for kind in alternatives(kinds[field.name])]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain = with_tuples(value)
        elif tuple in origins:
            plain = value.tolist() if hasattr(value, "tolist") else value
            plain = tuple(plain) if isinstance(plain, list) else plain
        if plain is not value:
            changed[field.name] = plain
    return dataclasses.replace(node, **changed) if changed else node


def parse_value(text: str, kind: Kind, key: str) -> object:
    """Parses a value of --set as `kind`; several values are a JSON list.

    Raises:
      UserError: the text does not fit; the message names the key.
    """
    if kind in SEQUENCES:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := strict_json.loads(text), list):
                return tuple(found)  # `check_settings` checks the elements
    if kind == NAMES and "," in text:  # split later by `read_columns`, which handles quotes
        return text
    if kind in (str, NAMES):
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    if kind == TEXTS:
        listed = json.dumps([part.strip() for part in text.split(",")], ensure_ascii=False)
        raise UserError(key, found=f"{text!r}", expected=f"a list of texts, as in --set '{key}={listed}'")
    raise UserError(key, found=f"{text!r}", expected=noun(kind))
