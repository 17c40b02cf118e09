"""A published data set as one value, and the task that reads it once it is prepared."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from pipejax.config import DataConfig, GridConfig
from pipejax.data.examples import Example
from pipejax.data.lines import text_of
from pipejax.data.manual import Manual
from pipejax.data.text import plain
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError
from pipejax.system.extras import extra
from pipejax.system.files import look

Record = dict[str, Any]  # of texts and lists of texts
Records = Iterator[tuple[str, str, Record]]  # ("FILE:LINE", key, record)


@dataclasses.dataclass(frozen=True)
class Published:
    """All that is particular to one data set: where its files come from, what they hold, and how that is laid out."""

    name: str
    directory: str  # in the data directory: TFDS's name, config if there is one, and version
    files: str  # what `--manual-dir` should hold, and where it is from
    read: Callable[[Manual], Mapping[str, Records]]  # by TFDS's names of the splits
    source: Callable[[Record], str]
    targets: Callable[[Record], Sequence[str]]
    metric: str
    separator: str
    grid: GridConfig  # the paper's where they cut little, else wider
    max_target: int  # tokens
    max_length: int  # tokens of the sequential decoder
    fields: Mapping[str, type] = dataclasses.field(default_factory=dict)  # of a builder of ours: str, or list of str
    splits: Mapping[str, str] = dataclasses.field(default_factory=lambda: {s: s for s in ("train", "dev", "test")})
    placeholders: tuple[tuple[str, str], ...] = ()  # what T5's pieces cannot hold, and what stands for it


def data_root(data_dir: str) -> Path:
    """That directory, or TFDS's own (the environment's TFDS_DATA_DIR, ~/tensorflow_datasets) where it is ""."""
    with extra("data", "data.data_dir"):
        import tensorflow_datasets as tfds

    return Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()


class PublishedTask:
    """Reads a data set that `pipejax data prepare` wrote, each example only when it is asked for."""

    def __init__(self, published: Published, config: DataConfig) -> None:
        """Files are opened only when a split is asked for."""
        self.published, self.metric = published, config.metric or published.metric
        self._data_dir = config.data_dir

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of a split; none if it was prepared without.

        Raises:
          UserError: it was never prepared there, or in a format that only TensorFlow reads.
        """
        source = self._source(self.published.splits[split])
        return PreparedExamples(source, functools.partial(self._example, split)) if source is not None else []

    def source(self, value: dict[str, Any], place: str) -> str:
        """What the fields of a record make, in the spelling of training; or its "source" as it is."""
        if "source" in value:
            return text_of(value, "source", place)
        return plain(self.published.source(_Fields(value, place)), self.published.placeholders)

    def tokenizer(self) -> Tokenizer | None:
        """It has none: `data.tokenizer` or the starting checkpoint brings one."""
        return None

    def _source(self, split: str) -> Sequence[Any] | None:
        with extra("data", f"data.task={self.published.name}"):
            import tensorflow_datasets as tfds

        root = data_root(self._data_dir)
        directory = root / self.published.directory
        if look(directory / "dataset_info.json", "data.data_dir:") != "file":
            raise UserError(
                f"data.data_dir: found no {self.published.directory} in {root}; expected what "
                f"`pipejax data prepare {self.published.name}` writes"
            )
        builder = tfds.builder_from_directory(str(directory))
        form = builder.info.file_format
        if form != tfds.core.FileFormat.ARRAY_RECORD:
            raise UserError(f"{directory}: found the format {form and form.value}; expected array_record")
        if split not in builder.info.splits or not builder.info.splits[split].num_examples:
            return None
        return builder.as_data_source(split=split)

    def _example(self, split: str, index: int, raw: Record) -> Example:
        record = {key: _text(value) for key, value in raw.items()}
        spell = functools.partial(plain, placeholders=self.published.placeholders)
        rows = (spell(row) for row in self.published.targets(record))
        name = record.get("id") or f"{split}-{index}"
        return Example(name, spell(self.published.source(record)), tuple(row for row in rows if row))


class _Fields(dict[str, Any]):
    """A record of unknown origin: a field that is absent or no text is an error that names its place."""

    def __init__(self, value: dict[str, Any], place: str) -> None:
        super().__init__(value)
        self._place = place

    def __getitem__(self, key: str) -> str:
        return text_of(dict(self), key, self._place)


class PreparedExamples(Sequence[Example]):
    """Records on disk, made into examples one by one."""

    def __init__(self, source: Sequence[Any], make: Callable[[int, Record], Example]) -> None:
        """Reads nothing yet."""
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


def _text(value: Any) -> Any:
    """TFDS reads text back as bytes, and sequences of it as lists or arrays of bytes."""
    return value.decode() if isinstance(value, bytes) else [item.decode() for item in value]
