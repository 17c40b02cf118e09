"""Reads a Hugging Face config.json by a table of keys, with the type, default, meaning of null and names of each key.

Files may lack keys: transformers then uses the default of its config class. For some keys null is a value with a
meaning, for others it is an error. Some keys have other names in other releases. `read_keys` returns only the keys of
its table. Reading a file does not require transformers: tests compare each row of the tables with transformers' config
classes. Importing this module does not import JAX.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipejax.system.errors import UserError
from pipejax.system.fields import noun, shown_value
from pipejax.system.strict_json import JsonObject

REQUIRED: Any = object()  # the default of a key that every file has
REFUSED: Any = object()  # the `null` of a key for which null is an error


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of an object in config.json."""

    kind: type | None  # the type of its value; None: checked where the value is used
    default: Any  # the value if the file lacks the key
    null: Any = REFUSED  # the value that null stands for
    names: tuple[str, ...] = ()  # other names, which take precedence as in transformers' `attribute_map`
    keys: "dict[str, Key]" = dataclasses.field(default_factory=dict)  # the keys of a value that is an object


Keys = dict[str, Key]


def id_key(default: int | None) -> Key:
    """Returns the key of a token id, which may be null or a list of ids, and is checked where it is used."""
    return Key(None, default, null=None)


def read_keys(facts: Mapping[str, object], keys: Keys, where: str = "") -> JsonObject:
    """Returns the value of every key in the table, and of no other key.

    Args:
      facts: an object of config.json.
      keys: the table.
      where: the path of the object for messages, such as "encoder.".

    Raises:
      UserError: a key is missing, or its value has another type; the message begins with the path of the key.
    """
    found = JsonObject()
    for name, key in keys.items():
        given = next((other for other in (*key.names, name) if other in facts), None)
        path = where + (given or name)
        value: Any = key.default if given is None else facts[given]
        if value is REQUIRED:
            raise UserError(path, "missing", expected="the key, as in every config.json")
        if given is not None and value is None:
            if key.null is REFUSED:
                raise UserError(path, found="null", expected=noun(key.kind))
            value = key.null
        if not (key.kind is None or value is None or _is_of(value, key.kind)):
            raise UserError(path, found=shown_value(value), expected=noun(key.kind))
        found[name] = read_keys(value, key.keys, f"{path}.") if key.keys else value
    return found


def _is_of(value: object, kind: type) -> bool:
    """Returns whether a JSON value has the type `kind`. An int is accepted as a float; a bool only as a bool."""
    return isinstance(value, (int, float) if kind is float else kind) and (kind is bool or type(value) is not bool)
