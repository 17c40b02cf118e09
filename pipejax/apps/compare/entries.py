"""Entries of a comparison: a run with a method, a drafter and settings."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from pipejax import config as config_lib
from pipejax import registry
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.system.errors import UserError, did_you_mean

FORM = "run=DIR[,method=NAME][,draft=NAME][,best=true][,name=TEXT][,KEY=VALUE ...]"
KEYS = ("run", "method", "draft", "best", "name")


class Entry(NamedTuple):
    """One line of a comparison."""

    name: str
    run: str  # the path of a run or of a converted checkpoint
    method: str | None = None  # None: the method that the weights were trained for
    best: bool = False  # whether the best evaluated step is used instead of the newest
    overrides: tuple[str, ...] = ()  # settings of grid and decode, as KEY=VALUE


def parse(text: str) -> Entry:
    """Parses an entry of the form `FORM`. A comma separates two parts only if KEY= follows it.

    Raises:
      UserError: a part has no value or an unknown key, or the run is missing.
    """
    parts = [part.partition("=") for part in re.split(r",(?=[A-Za-z_][\w.]*=)", text)]
    found = {key.strip(): value for key, _, value in parts}
    for key, equals, _ in parts:
        if not equals or ("." not in key and key not in KEYS):
            expected = f"{FORM}, with keys of grid and decode such as decode.beams"
            raise UserError("--entry", found=f"{key!r}", expected=expected, hint=did_you_mean(key, KEYS))
    if len(found) < len(parts):
        raise UserError("--entry", found=f"{text!r}, with a key twice", expected="each key once")
    if not found.get("run"):
        raise UserError("--entry", found=f"{text!r}", expected=f"a run: {FORM}")
    if found.get("best", "true") not in ("true", "false"):
        raise UserError("--entry: best", found=repr(found["best"]), expected="true or false")
    method, names = found.get("method"), (*config_lib.METHODS, *registry.METHODS)
    if method is not None and method not in names and ":" not in method:
        expected = f"{', '.join(names)} or MODULE:CLASS"
        raise UserError("--entry: method", found=repr(method), expected=expected, hint=did_you_mean(method, names))
    foreign = method is not None and method not in config_lib.METHODS
    settings = [f"method={method}"] if foreign else []
    settings += [f"decode.draft={found['draft']}"] if "draft" in found else []
    settings += [f"{key}={value}" for key, value in found.items() if key not in KEYS]
    name = found.get("name") or text.removeprefix("run=")
    return Entry(name, found["run"], None if foreign else method, found.get("best") == "true", tuple(settings))


def open_all(entries: Sequence[Entry]) -> list[Generator]:
    """Opens the runs. Entries with the same run and settings share weights and compiled programs.

    Raises:
      UserError: a run or a setting is wrong; the error names the entry.
    """
    opened: dict[tuple[str, bool, tuple[str, ...]], Generator] = {}
    for entry in entries:
        key = entry.run, entry.best, entry.overrides
        if key not in opened:
            try:
                opened[key] = load(entry.run, best=entry.best, overrides=entry.overrides, where="KEY=VALUE")
            except UserError as error:
                raise error.within(f"--entry {entry.name}") from error
    return [opened[entry.run, entry.best, entry.overrides] for entry in entries]
