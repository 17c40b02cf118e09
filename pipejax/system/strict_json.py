"""Reads JSON, and refuses objects with duplicate keys, for which JSON does not define a value."""

import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

# An object of JSON, such as a config.json: its values are checked where they are used. A `JsonMapping` is only read.
JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]


class DuplicateKey(ValueError):
    """Raised if an object has a duplicate key."""

    def __init__(self, key: str) -> None:
        """Describes the first repeated key."""
        shown = f'"{key}"' if key.isprintable() and len(key) <= 60 else reprlib.repr(key)
        self.found, self.expected = f"the key {shown} twice in one object", "it once"
        super().__init__(f"found {self.found}; expected {self.expected}")


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise DuplicateKey(next(key for i, key in enumerate(names) if key in names[:i]))
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)  # made once; `json.loads` would make a decoder in each call


def loads(text: str | bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parses a JSON text; see `json.loads` for the arguments.

    Raises:
      DuplicateKey: an object has a duplicate key.
      ValueError: the text is not JSON.
      RecursionError: the text is nested too deeply.
    """
    if parse_constant is None and isinstance(text, str) and not text.startswith("\ufeff"):
        return DECODER.decode(text)
    return json.loads(text, object_pairs_hook=_object, parse_constant=parse_constant)
