"""The names and the order of the arguments of kernel calls, read from fields.h, which the C++ code includes, too."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from pipejax.system import Tree

Entry = TypeVar("Entry")

_TEXT = re.sub(r"/\*.*?\*/|//.*", "", (Path(__file__).parent / "fields.h").read_text(encoding="utf-8"))
_BODIES: dict[str, str] = dict(re.findall(r"#define (\w+)\([^)]*\)((?:[^\n]*\\\n)*[^\n]*)", _TEXT))


def _names(table: str) -> list[str]:
    """Returns the names of a table in fields.h, with the names of tables that it includes."""
    found: list[str] = []
    for macro, name in re.findall(r"\b(\w+)\((\w+)", _BODIES[table]):
        found += _names(macro) if macro in _BODIES else [name]
    return found


TABLES = {table: _names(table) for table in _BODIES}


def arrays(table: str, given: Mapping[str, Tree]) -> list[jax.Array]:
    """Returns the arguments of a call of the kernel, in the order of a table of fields.h.

    Args:
      table: the name of the table in fields.h.
      given: the arrays by name; a `weights.Matrix` becomes two arrays, its panels and its scale.

    Raises:
      TypeError: a name is missing or unknown.
    """
    leaves: list[jax.Array] = jax.tree.leaves(_order(table, given))
    return leaves


def numbers(table: str, given: Mapping[str, int]) -> np.ndarray:
    """Returns i64 [n], the attribute of a call with its sizes, in the order of a table. Errors are as in `arrays`."""
    return np.asarray(_order(table, given), np.int64)


def _order(table: str, given: Mapping[str, Entry]) -> list[Entry]:
    """Returns the values of `given` in the order of a table. Raises a TypeError if a name is missing or unknown."""
    names = TABLES[table]
    missing, unknown = [x for x in names if x not in given], [x for x in given if x not in names]
    if missing or unknown:
        raise TypeError(f"{table}: missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}")
    return [given[name] for name in names]
