"""Examples as text, and what every task gives."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from pipejax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Example:
    """One document and its target rows, as text."""

    id: str
    source: str
    targets: tuple[str, ...]


class Task(Protocol):
    """Where examples come from."""

    metric: str  # "spans", "keyphrases" or "rouge"

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of "train", "dev" or "test"; empty if there are none."""

    def source(self, value: dict[str, Any], place: str) -> str:
        """What the model reads of an unlabelled record at "FILE:LINE": its fields as in training, or its "source".

        Raises:
          UserError: a field is absent or no text.
        """

    def tokenizer(self) -> Tokenizer | None:
        """The task's own tokenizer, if it has one."""


def fingerprint(examples: Sequence[Example], most: int = 1000) -> str:
    """A digest of the number of examples and of `most` of them at the most, evenly spread: reading all takes long."""
    spread = range(0, len(examples), -(-len(examples) // most) or 1)
    told = repr((len(examples), *(examples[i] for i in spread)))
    return hashlib.sha256(told.encode("utf-8", "backslashreplace")).hexdigest()
