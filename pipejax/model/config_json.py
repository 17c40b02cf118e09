"""The keys of a Hugging Face config.json that a backbone reads: kinds, defaults, null and other names.

A file need not have every key. transformers fills in the default of its config class for a key that is absent. null is
a value of its own for some keys, and refused for others. Releases have named some keys differently. A table says so for
each key, and `read_keys` returns nothing that is not in its table. Reading a file takes no transformers: the tests
compare each row with its config classes. Importing this module does not import JAX.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipejax.system.errors import UserError
from pipejax.system.fields import noun, shown_value

REQUIRED: Any = object()  # the default of a key that every file has
REFUSED: Any = object()  # of null: not a value of this key


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of an object in config.json."""

    kind: Any  # the type of its value; Any: checked where the value is used
    default: Any  # the value of a file without the key
    null: Any = REFUSED  # the value that null means
    names: tuple[str, ...] = ()  # other names of the key, which go before it as in transformers' `attribute_map`
    keys: "dict[str, Key]" = dataclasses.field(default_factory=dict)  # of an object that is its value


Keys = dict[str, Key]


def read_keys(facts: Mapping[str, object], keys: Keys, where: str = "") -> dict[str, Any]:
    """The value of every key in the table, and of no other key.

    Args:
      facts: an object of config.json.
      keys: the table.
      where: the path of the object for messages, such as "encoder.".

    Raises:
      UserError: a key is missing, or its value has another type; the message begins with the path of the key.
    """
    found = dict[str, Any]()
    for name, key in keys.items():
        given = next((other for other in (*key.names, name) if other in facts), None)
        path = where + (given or name)
        value: Any = key.default if given is None else facts[given]
        if value is REQUIRED:
            raise UserError(f"{path}: missing; expected it, as in every config.json")
        if given is not None and value is None:
            if key.null is REFUSED:
                raise UserError(f"{path}: found null; expected {noun(key.kind)}")
            value = key.null
        if not (key.kind is Any or value is None or _is_of(value, key.kind)):
            raise UserError(f"{path}: found {shown_value(value)}; expected {noun(key.kind)}")
        found[name] = read_keys(value, key.keys, f"{path}.") if key.keys else value
    return found


def _is_of(value: object, kind: type) -> bool:
    """Whether a value of JSON is of that type; a float may be written as an int, and no bool is an int."""
    return isinstance(value, (int, float) if kind is float else kind) and (kind is bool or type(value) is not bool)
