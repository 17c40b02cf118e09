"""Examples as text, and the protocol of a task."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

from pipejax.data.lines import Object
from pipejax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Example:
    """One document and its target rows, as text."""

    id: str
    source: str
    targets: tuple[str, ...]
    place: str = dataclasses.field(default="", repr=False, compare=False)  # "FILE:LINE", for errors; "": unknown
    # The text in which present keyphrases are searched; "": the source.
    document: str = dataclasses.field(default="", repr=False, compare=False)


class PreparedExamples(Sequence[Example]):
    """A sequence of examples that are made from the records of `source` on access."""

    def __init__(self, source: Sequence[Any], make: Callable[[int, Any], Example]) -> None:
        self._source, self._make = source, make

    def __len__(self) -> int:
        return len(self._source)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self._make(i, self._source[i]) for i in places]
        return self._make(places, self._source[places])


class Task(Protocol):
    """A source of examples, with the metric of its outputs and optionally a tokenizer."""

    metric: str  # one of `metrics.HEADLINES`
    template: str  # the text from which `source` builds an input, with field names in braces

    def examples(self, split: str) -> Sequence[Example]:
        """Returns the examples of the split "train", "dev" or "test"; empty if the task lacks that split."""

    def source(self, value: Object, place: str) -> str:
        """Returns the model's input for a record without targets.

        `place` is the record's "FILE:LINE", for messages.

        Raises:
          UserError: the record lacks the task's fields.
        """

    def tokenizer(self) -> Tokenizer | None:
        """Returns the task's tokenizer; None: `data.tokenizer` or the starting checkpoint provides one."""
        return None


def fingerprint(examples: Sequence[Example], most: int | None = 1000, names: Sequence[str] = ()) -> str:
    """Returns the SHA-256 of the number of examples, of a sample of them, and of the names of their files.

    Args:
      examples: the examples.
      most: the size of the sample, at even distances; None: all examples.
      names: the names of the files, for streams.
    """
    sampled = range(0, len(examples), 1 if most is None else -(-len(examples) // most) or 1)
    text = repr((len(examples), *(examples[i] for i in sampled), *names))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
