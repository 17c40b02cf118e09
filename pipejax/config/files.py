"""Configs as files and on the command line: loading, overriding, JSON.

The module itself needs only the standard library.

A config file is a short Python file that assigns `config = Config(...)`, or the `config.json` of a run.
"""

import contextlib
import dataclasses
import difflib
import importlib
import json
import operator
import os
import re
import runpy
import sys
import traceback
import typing
from pathlib import Path
from typing import Any

from pipejax import moved
from pipejax.config.row_names import names_of, quoted
from pipejax.config.sections import SECTIONS, SETTINGS, Config, check
from pipejax.model.backbone import Backbone
from pipejax.model.t5_config import T5Config
from pipejax.registry import BACKBONES, METHODS
from pipejax.system import strict_json
from pipejax.system.errors import UserError, first_line
from pipejax.system.fields import (
    NAMES,
    SEQUENCES,
    Command,
    alternatives,
    parse_value,
    plain_value,
    shown_value,
    types_of,
    with_tuples,
)
from pipejax.system.files import look, read_small
from pipejax.system.strict_json import JsonObject

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Section = typing.TypeVar("_Section", bound="DataclassInstance")
# Sections that may be of any class with this attribute: (attribute, name of the base class).
OWN = {
    "method": ("strategy", "Method"),
    "model": ("module", "Backbone"),
    "auxiliary": ("init_params", "Auxiliary"),
}
RULES = "decode.rules"
# Settings that may name a class as MODULE:CLASS: (attribute, description of the class).
CLASSES = {
    **OWN,
    RULES: ("apply", "Rule that is a flax.struct.dataclass"),
    "decode.draft": ("propose", "Drafter that is a dataclass"),
}
COMMANDS: dict[Command, str] = {  # the words with which a message describes a command
    "decode": "when a checkpoint is decoded",
    "export": "in an export",
    "probe": "when rows are probed",
    "teach": "when rows are taught",
}


# Texts `section.key=value` as for --set, or values by "section.key"; the values of a section may be a nested dict.
Overrides = typing.Sequence[str] | typing.Mapping[str, object]


class Assignment(typing.NamedTuple):
    """A setting and its value."""

    key: str
    value: object
    written: bool  # whether the value is text that has to be parsed


def load(path: str | Path, overrides: Overrides = (), *, where: str = "--set", imports: bool = True) -> Config:
    """Runs a config file, or reads one written by `to_json`, and applies overrides.

    Args:
      path: the file.
      overrides: settings.
      where: the origin of the overrides, for messages.
      imports: whether to import the module of a method that the file names, which runs its code.

    Raises:
      UserError: the file is absent, does not run or defines no `config`; a key is unknown; or a value is invalid.
    """
    path = Path(path)
    if (found := look(path)) != "file":
        says = "found a directory" if found else "no such file"
        raise UserError(path, says, expected="a config file")
    try:
        if path.suffix != ".json":
            config = runpy.run_path(str(path)).get("config")
        else:
            config = from_json(read_small(path), where=str(path))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        message = error.msg if isinstance(error, SyntaxError) else first_line(error)
        # Newer Python versions add a hint to the message.
        keyword = re.search(r"unexpected keyword argument '(\w+)'$", message)
        hint = _suggestion(keyword[1]) if keyword else ""
        if isinstance(error, SyntaxError) and path.suffix not in (".py", ".json"):
            hint = "expected a Python file, or the config.json of a run"
        raise UserError(_place(error, path), f"{type(error).__name__}: {message}", hint=hint) from error
    if not isinstance(config, Config):
        raise UserError(path, found="no `config = Config(...)`", expected="one")
    if imports and is_class_name(config.decode.draft):
        find_class(config.decode.draft, "decode.draft")
    for key in ("method", "auxiliary") if imports else ():
        if isinstance(own := getattr(config, key), str | dict):  # a class name, or the JSON form of an object
            name = own if isinstance(own, str) else own.get("class")
            made_of = {"class": name} if isinstance(own, str) else own
            changed: JsonObject = {key: _of_class(name, made_of, key) if name else None}
            config = dataclasses.replace(config, **changed)
    config = with_tuples(config)
    check(config, where=str(path))
    if imports:
        _import_rules(config)
    return override(config, overrides, where=where)


def override(config: Config, overrides: Overrides, *, where: str = "--set") -> Config:
    """Applies overrides from left to right and checks the result.

    `where` is the origin of the overrides, for messages.

    Raises:
      UserError: a key is unknown, or a value is invalid.
    """
    for key, value, written in assignments(overrides, where):
        if key == "decode.draft" and is_class_name(value):
            find_class(str(value), key)  # imported here, as the setting was given by the caller and not by a run
        if key in ("method", "auxiliary") or _names_backbone(key, value):
            config = _set_own(config, key, value)
        else:
            config = _assign(config, key.split("."), value, key, written=written)
    config = with_tuples(config)
    if config.data.columns and not config.grid.row_names:
        config = dataclasses.replace(
            config, grid=dataclasses.replace(config.grid, row_names=names_of(config.data.columns))
        )
    check(config, where=where)
    if any(key == RULES for key, *_ in assignments(overrides, where)):
        _import_rules(config)
    return config


def _import_rules(config: Config) -> None:
    """Imports the classes that `decode.rules` names."""
    for name in config.decode.rule_names:
        find_class(name, RULES)


def assignments(overrides: Overrides, where: str) -> list[Assignment]:
    """Returns the settings that overrides change, by their current keys.

    Raises:
      UserError: the overrides are malformed, or have both the former and the current key of a setting; the message
        begins with `where`.
    """
    found = _assignments(overrides, where)
    written = {one.key for one in found}
    for former, present in moved.MOVED_KEYS.items():
        if former in written:
            if present in written:
                raise moved.both(former, present).within(where)
            moved.note(former, present)
    return [one._replace(key=moved.MOVED_KEYS.get(one.key, one.key)) for one in found]


def _assignments(overrides: Overrides, where: str) -> list[Assignment]:
    """Returns the settings by the keys that the overrides have."""
    if isinstance(overrides, typing.Mapping):
        return list(_values(overrides, "", where))
    if isinstance(overrides, str | bytes) or not isinstance(overrides, typing.Sequence):
        raise UserError(where, found=shown_value(overrides), expected='a dict of values, or a list of "key=value"')
    found = []
    for assignment in overrides:
        if not isinstance(assignment, str):
            raise UserError(where, found=f"{shown_value(assignment)} in the list", expected='a text "key=value"')
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not SETTINGS.get(key, {}).get("keeps_spaces"):
            text = text.strip()
        elif key.endswith("delimiter") and text in (r"\n", r"\t"):
            raise UserError(
                f"{where} {assignment}", found="two characters", expected="one character; $'\\t' is a tab in bash"
            )
        if not (key and equals):
            raise UserError(
                f"{where} {assignment}", found=f"no {('key' if equals else repr('='))}", expected="key=value"
            )
        found.append(Assignment(key, text, written=True))
    return found


def _values(values: typing.Mapping[str, object], prefix: str, where: str) -> typing.Iterator[Assignment]:
    for name, value in values.items():
        if not isinstance(name, str):
            raise UserError(where, found=f"the key {shown_value(name)}", expected='a text such as "grid.delay"')
        if isinstance(value, typing.Mapping):
            yield from _values(value, f"{prefix}{name}.", where)
        else:
            yield Assignment(prefix + name, value, written=False)


def to_json(config: Config) -> str:
    """Returns the resolved config as JSON text."""
    values = dataclasses.asdict(config)
    for key in ("method", "auxiliary"):
        if getattr(config, key) is None:  # older releases do not know the key
            del values[key]
    for key in OWN:
        if _has_class(getattr(config, key)):
            values[key] = described(getattr(config, key), key)
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _has_class(value: object) -> bool:
    """Returns whether the JSON form of a section names its class, because the section may be of several classes."""
    return value is not None and type(value) is not T5Config


def described(value: Any, key: str = "method") -> JsonObject:
    """Returns the JSON form of a method or backbone: "class" is MODULE:CLASS, and the other keys are its settings.

    Raises:
      UserError: the class is not importable, or a setting has no JSON form.
    """
    if isinstance(value, dict):  # already in this form, as read from a run
        return value
    kind = type(value)
    if kind.__module__ in ("__main__", "<run_path>"):
        raise UserError(
            key,
            found=f"{kind.__qualname__}, a class of the script itself",
            expected="a class of an importable module, so that the run can be opened again",
        )
    try:
        found: JsonObject = strict_json.loads(json.dumps(dataclasses.asdict(value)))
    except (TypeError, ValueError) as error:
        raise UserError(
            key, found=shown_value(value), expected="settings that JSON can represent", hint=first_line(error)
        ) from error
    return {"class": f"{kind.__module__}:{kind.__qualname__}", **found}


def is_class_name(value: object) -> bool:
    """Returns whether the value of a setting has the form MODULE:CLASS."""
    return isinstance(value, str) and all(value.partition(":"))


def made(section: JsonObject, key: str = "method") -> Any:
    """Makes the method, the backbone or the drafter that a run describes.

    A run must not cause imports of foreign code, so the module of the class must already be imported, unless the class
    belongs to pipejax.

    Raises:
      UserError: the module is not imported, or the settings do not fit the class.
    """
    section = {**section, "class": moved.present_class(section["class"])}
    name = section["class"]
    if name not in BACKBONES.values() and not name.startswith("pipejax."):
        _check_imported(name, key)
    return _of_class(name, section, key)


def imported_rule(name: str) -> Any:
    """Returns the class MODULE:CLASS of `decode.rules`. Raises a UserError if its module is not imported yet."""
    _check_imported(name, RULES)
    return find_class(name, RULES)


def _check_imported(name: str, key: str) -> None:
    """Raises a UserError if the module of MODULE:CLASS is not imported yet."""
    if (module := name.partition(":")[0]) not in sys.modules:
        python = "pipejax.load(path, method=...)" if key == "method" else f"import {module}"
        origin = "with which this model was trained" if key in OWN else "which the config of this checkpoint names"
        raise UserError(
            key,
            found=f"{name}, {origin}",
            expected=f"its module to be imported, by --set {key}={name}, or in Python by {python}",
        )


def _of_class(name: str, section: JsonObject, key: str = "method") -> Any:
    """Makes a method, backbone or drafter of the named class.

    A backbone gets the values of `section`; other objects get these values only if `section` describes the same class.
    """
    name = METHODS.get(name, name) if key == "method" else name
    is_same = key == "model" or section["class"] == name
    settings = {field: value for field, value in section.items() if field != "class" and is_same}
    return _build(find_class(name, key), settings, f"{key}.", name)


def find_class(name: str, key: str = "method") -> Any:
    """Returns the class of "MODULE:CLASS".

    The current directory is added to the import path if the module is not imported yet.

    Raises:
      UserError: the module cannot be imported, or the class is not of the kind that the setting `key` names.
    """
    name = moved.present_class(name)
    module, _, attribute = name.partition(":")
    is_known = module in sys.modules or name in BACKBONES.values()
    if not is_known and (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module))
    except (Exception, SystemExit) as error:
        raise UserError(
            key,
            found=f"{name!r}, which cannot be imported ({type(error).__name__}: {first_line(error)})",
            expected="MODULE:CLASS",
        ) from error
    part, base = CLASSES[key]
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, part)):
        is_not = f"not a {base}" if key == "decode.draft" else f"not a subclass of {base}"
        raise UserError(key, found=f"{name!r}, which is {is_not}", expected="MODULE:CLASS")
    return found


def takes(command: Command, key: str) -> bool:
    """Returns whether --set of a command may change the setting of a dotted key, or all settings of a section.

    A key that no section of `Config` declares, such as one of a method, has the facts of its section.
    """
    declared = SETTINGS.get(key) or SECTIONS[key.partition(".")[0]]
    return command in declared.get("commands", ())


def check_taken(overrides: Overrides, command: Command, *, where: str = "--set") -> None:
    """Raises a UserError for the first override that a command does not accept.

    Every command accepts model=MODULE:CLASS, a custom backbone, whose module is imported here. `where` is the origin of
    the overrides, for messages.
    """
    for key, value, _ in assignments(overrides, where):
        if key.partition(".")[0] not in SECTIONS:
            raise UserError(f"{where}: {key}", "unknown key", hint=_suggestion(key))
        if not takes(command, key) and not _names_backbone(key, value):
            raise not_taken(command, key, where)


def not_taken(command: Command, key: str, where: str) -> UserError:
    """Returns the error for a setting that a command does not accept."""
    whole = [name for name in SECTIONS if name not in SETTINGS and takes(command, name)]
    keys = [key for key in SETTINGS if key.partition(".")[0] not in whole and takes(command, key)]
    expected = f"one of {', '.join([*whole, *keys])}"
    return UserError(where, f"{key} cannot be changed {COMMANDS[command]}", expected=expected)


def _names_backbone(key: str, value: object) -> bool:
    """Returns whether a setting is model=MODULE:CLASS, the class of a backbone; if so, imports the module."""
    return key == "model" and isinstance(value, str) and ":" in value and bool(find_class(value, key))


def backbone(overrides: Overrides) -> type[Backbone] | None:
    """Returns the class in `--set model=MODULE:CLASS`, or None without it.

    This function serves commands whose only setting is the class of a backbone.

    Raises:
      UserError: there is another setting.
    """
    found: type[Backbone] | None = None
    for key, value, _ in assignments(overrides, "--set"):
        if not _names_backbone(key, value):
            raise UserError(f"--set {key}", "cannot be changed here", expected="model=MODULE:CLASS, a custom backbone")
        found = find_class(str(value), key)
    return found


def from_json(text: str | bytes, *, where: str) -> Config:
    """Reads the output of `to_json`.

    `where` is the file's name, for messages. A method whose class is not imported stays in its JSON form.

    Raises:
      UserError: the text is not a valid config.
    """
    try:
        values = strict_json.loads(text)
    except strict_json.DuplicateKey as error:
        raise UserError(where, found=error.found, expected=error.expected) from error
    except (ValueError, RecursionError) as error:
        raise UserError(where, f"not valid JSON ({first_line(error)})") from error
    given = {key: values.pop(key, None) for key in ("method", "auxiliary")} if isinstance(values, dict) else {}
    config: Config = _build(Config, _with_present_keys(values, where), "", where)
    for key, section in given.items():
        if section is None:
            continue
        if not (isinstance(section, dict) and isinstance(section.get("class"), str)):
            raise UserError(f"{where}: {key}", found=shown_value(section), expected='an object with "class"')
        with contextlib.suppress(UserError):  # the class may be passed later, when the run is opened
            given[key] = made(section, key)
    config = dataclasses.replace(config, **given)
    check(config, where=where)
    return config


def _with_present_keys(values: Any, where: str) -> Any:
    """Returns parsed JSON of a config with the present names of keys in place of names of older releases.

    Raises:
      UserError: a setting has its former and its present key.
    """
    for former, present in moved.MOVED_KEYS.items():
        (section, old), new = former.split("."), present.rpartition(".")[2]
        if isinstance(values, dict) and isinstance(inner := values.get(section), dict) and old in inner:
            if new in inner:
                raise moved.both(former, present).within(where)
            values = {**values, section: {new if key == old else key: value for key, value in inner.items()}}
    return values


def from_saved(values: object, *, where: str) -> Config:
    """Reads a config that was saved with weights, from its parsed JSON.

    Configs saved by older releases lack `data.special_tokens`. Weights that an older release trained keep
    the source ids of their training; converted weights get transformers' ids.
    """
    config = from_json(json.dumps(values), where=where)
    if config.train.method != "none" and lacks_special_tokens(values):
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, special_tokens="eos"))
    return config


def lacks_special_tokens(values: object) -> bool:
    """Returns whether the config was saved by an older release, without `data.special_tokens`."""
    data = values.get("data") if isinstance(values, dict) else None
    return not isinstance(data, dict) or "special_tokens" not in data


def flat(config: "DataclassInstance", prefix: str = "") -> dict[str, object]:
    """Returns all settings by dotted key, in order, with JSON values."""
    leaves: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = prefix + field.name
        if key in OWN and _has_class(value):
            leaves |= {f"{key}.{name}": inner for name, inner in described(value, key).items()}
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            leaves |= flat(value, f"{key}.")
        else:
            leaves[key] = list(value) if isinstance(value, tuple) else value
    return leaves


def _set_own(config: Config, key: str, value: object) -> Config:
    """Returns the config with another method or backbone; a class name keeps the settings of the previous one."""
    if value and isinstance(value, str):
        old = getattr(config, key)
        if old is None and key == "model":  # the model will come from `train.init_from`
            return config
        value = _of_class(value, {"class": ""} if old is None else described(old, key), key)
    changed: JsonObject = {key: value or None}
    return dataclasses.replace(config, **changed)


def _assign(node: _Section, keys: list[str], value: object, full: str, *, written: bool) -> _Section:
    """Returns the section with one setting changed.

    Args:
      node: the section.
      keys: the path of the setting below the section.
      value: the new value.
      full: the dotted key, for messages.
      written: whether the value is text that has to be parsed.

    Raises:
      UserError: the key is unknown or names a section, or the value is invalid.
    """
    names = [field.name for field in dataclasses.fields(node)]
    if keys[0] not in names:
        raise UserError(full, "unknown key", hint=_suggestion(full))
    if full == "model" and isinstance(value, Backbone):
        return dataclasses.replace(node, model=value)
    old = getattr(node, keys[0])
    kind = types_of(type(node))[keys[0]]
    if len(keys) > 1:
        old = made(old, keys[0]) if isinstance(old, dict) else old
        if old is None:
            raise UserError(full, found=f"no {keys[0]} in this config", expected="a config with that section")
        if not dataclasses.is_dataclass(old) or isinstance(old, type):
            parent = full.removesuffix("." + ".".join(keys[1:]))
            raise UserError(full, f"{keys[0]} is not a section", hint=f"did you mean {parent}?")
        return dataclasses.replace(node, **{keys[0]: _assign(old, keys[1:], value, full, written=written)})
    if dataclasses.is_dataclass(old) or kind not in (int, float, bool, str, *SEQUENCES):
        names = [field.name for field in dataclasses.fields(old if dataclasses.is_dataclass(old) else T5Config)]
        raise UserError(full, found="a section", expected=f"one of its keys, such as {full}.{names[0]}")
    value = parse_value(value, kind, full) if written and isinstance(value, str) else plain_value(value, kind)
    try:
        return dataclasses.replace(node, **{keys[0]: value})
    except Exception as error:  # a method's class may raise any exception
        raise UserError(
            full, found=f"{shown_value(value)}; {type(node).__name__} rejects it: {first_line(error)}"
        ) from error


def _build(cls: type, values: object, prefix: str, where: str) -> Any:
    """Makes a section from parsed JSON.

    Args:
      cls: the dataclass.
      values: the JSON object.
      prefix: the dotted key of the section, for messages.
      where: the origin of the values, for messages.

    Raises:
      UserError: a key is unknown or missing, or the class refuses a value.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where}: {prefix[:-1] or 'top level'}", found=type(values).__name__, expected="an object")
    kinds, fields = types_of(cls), dataclasses.fields(cls)
    for key in values:
        if key not in [f.name for f in fields]:
            raise UserError(f"{where}: {prefix}{key}", "unknown key", hint=_suggestion(prefix + key))
    built = {}
    for key, value in values.items():
        section = next(
            (k for k in alternatives(kinds[key]) if isinstance(k, type) and dataclasses.is_dataclass(k)), None
        )
        if key == "model" and isinstance(value, dict) and isinstance(value.get("class"), str):
            built[key] = made(value, key)
            continue
        value = tuple(value) if kinds[key] in SEQUENCES and isinstance(value, list) else value
        value = quoted(value) if kinds[key] == NAMES and isinstance(value, str) else value  # several names are a list
        built[key] = _build(section, value, f"{prefix}{key}.", where) if section and value is not None else value
    try:
        return cls(**built)
    except Exception as error:  # a method's class may raise any exception
        for f in fields:
            if f.name not in built and f.default is f.default_factory is dataclasses.MISSING:
                raise UserError(f"{where}: {prefix}{f.name}", "missing") from error
        raise UserError(
            f"{where}: {prefix[:-1]}", f"cannot be made ({type(error).__name__}: {first_line(error)})"
        ) from error


def _suggestion(key: str) -> str:
    """Returns a hint for an unknown key: the most similar key, or the keys or sections that exist."""
    every = [*flat(Config()), *(f"model.{f.name}" for f in dataclasses.fields(T5Config))]
    section, _, name = key.rpartition(".")
    names = [k.rpartition(".")[2] for k in every]
    close = [name] if name in names else difflib.get_close_matches(name, names, n=1)
    if close:  # if several sections have a key of that name, the section with the most similar name
        candidates = [k for k, known in zip(every, names, strict=True) if known == close[0]]
        return f"did you mean {difflib.get_close_matches(key, candidates, n=1, cutoff=0.0)[0]}?"
    siblings = [k.removeprefix(f"{section}.") for k in every if k.startswith(f"{section}.")]
    if siblings:
        return f"the keys of {section} are {', '.join(siblings)}"
    return f"the sections are {', '.join(SECTIONS)}"


def _place(error: BaseException, path: Path) -> str:
    """Returns FILE:LINE of the line in the config file that raised the error, or of a syntax error in any file."""
    if isinstance(error, SyntaxError):
        file = error.filename or str(path)
        return f"{file}:{error.lineno}" if error.lineno else file
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
