"""Examples as text, in memory or read on demand in an order that a resumed run reproduces; the protocol of a task."""

import dataclasses
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, overload

import numpy as np

from pipejax.data.lines import Object
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError, described_error


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


logger = logging.getLogger(__name__)

# yields buffers of the examples in these files, in the order of the files
Read = Callable[[Sequence[str]], Iterator[list[Example]]]


class Stream(PreparedExamples):
    """The first buffer of the training examples, as a sample of all; `Shuffled` reads the rest."""

    def __init__(self, files: Sequence[str], read: Read, size: int) -> None:
        self.files, self.read, self.size = list(files), read, size
        super().__init__(next(filter(None, read(self.files)), []), lambda i, example: example)
        logger.info(f"data.train: {len(self.files)} files are read as needed, {size} examples at a time")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files without their common directory."""
        parts = [file.split("/") for file in self.files]
        shared = min(len(os.path.commonprefix(parts)), len(parts[0]) - 1)  # noqa: RUF071  # it also compares lists of names
        return tuple("/".join(part[shared:]) for part in parts)


class Shuffled:
    """The examples of a stream, numbered from 0: pass after pass, with shuffled files and shuffled buffers.

    Example i depends only on the files and the seed, so a resumed run gets the same example; it first reads the
    examples before it.
    """

    def __init__(self, stream: Stream, seed: int) -> None:
        self.stream, self.seed = stream, seed
        self._count: int | None = None  # examples per pass; None until the first pass ends
        # The newest buffers, each with the number of its first example.
        self._kept: list[tuple[int, list[Example]]] = []
        self._begin(0)

    def __getitem__(self, number: int) -> Example:
        """Returns the example with this number.

        The last `2 * size` past examples are kept in memory; for earlier ones the files are read again.
        """
        if self._kept and number < self._kept[0][0]:
            self._go_to(number)
        if number >= self._end + 2 * self.stream.size:
            logger.info(f"data.train: skipping to example {number}")
        while number >= self._end:
            if self._count and number // self._count > self._pass and number >= self._end + self.stream.size:
                self._go_to(number)
            self._read_on()
        first, examples = next(kept for kept in reversed(self._kept) if kept[0] <= number)
        return examples[number - first]

    def __len__(self) -> int:
        return sys.maxsize

    def _go_to(self, number: int) -> None:
        self._kept.clear()
        self._begin(number // self._count if self._count else 0)

    def _begin(self, number: int) -> None:
        chance = np.random.default_rng([self.seed, number])
        order = [self.stream.files[i] for i in chance.permutation(len(self.stream.files))]
        self._pass, self._buffer, self._end = number, 0, number * (self._count or 0)
        self._buffers = self.stream.read(order)

    def _read_on(self) -> None:
        """Reads the next buffer and shuffles it; begins the next pass after the last buffer.

        Raises:
          UserError: a file cannot be read, or a later pass has another number of examples than the first.
        """
        try:
            examples = next(self._buffers, None)
        except UserError:
            raise
        except Exception as error:  # a broken connection may raise any exception
            raise UserError("data.train", f"cannot be read further ({described_error(error)})") from error
        if examples is None:
            found = self._end - self._pass * (self._count or 0)
            if self._count not in (None, found):
                raise UserError(
                    "data.train", found=f"{found} examples", expected=f"{self._count}, as in the first pass"
                )
            self._count = found
            self._begin(self._pass + 1)
            return
        order = np.random.default_rng([self.seed, self._pass, self._buffer]).permutation(len(examples))
        self._kept.append((self._end, [examples[i] for i in order]))
        self._buffer, self._end = self._buffer + 1, self._end + len(examples)
        while self._end - self._kept[0][0] - len(self._kept[0][1]) >= 2 * self.stream.size:
            del self._kept[0]
