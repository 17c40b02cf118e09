"""The description of a published data set, and the task that reads the prepared data set."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipejax.apps.papers.manual import Manual
from pipejax.apps.papers.texts import plain_text
from pipejax.config import Config, DataConfig, GridConfig
from pipejax.data.examples import Example, PreparedExamples, Task
from pipejax.data.lines import Object, text_of
from pipejax.data.text import Template
from pipejax.metrics import HEADLINES
from pipejax.system.errors import UserError
from pipejax.system.extras import extra
from pipejax.system.files import look
from pipejax.system.strict_json import JsonObject

Record = JsonObject  # a text or a list of texts by field
Records = Iterator[tuple[str, str, Record]]  # ("FILE:LINE", key, record)


@dataclasses.dataclass(frozen=True)
class Published:
    """Everything that differs between data sets: their files, their fields, and how a record becomes an example."""

    name: str
    directory: str  # relative to the data directory: TFDS's NAME/VERSION, or NAME/CONFIG/VERSION
    files: str  # the files that `--manual-dir` should contain, and their address, in words for messages
    read: Callable[[Manual], Mapping[str, Records]]  # returns the records by TFDS's name of the split
    source: Callable[[Record], str]  # the model's input
    targets: Callable[[Record], Sequence[str]]  # the target rows
    grid: GridConfig  # the paper's limits if they cut few examples, else wider ones
    max_target: int  # tokens of a training target
    max_length: int  # the most tokens that the sequential decoder generates
    metric: str = "rouge_score"
    separator: str = " "
    # The type of each field: str, or list for a list of str. TFDS's builders need none.
    fields: Mapping[str, type] = dataclasses.field(default_factory=dict)
    # TFDS's name of each split.
    splits: Mapping[str, str] = dataclasses.field(default_factory=lambda: {s: s for s in ("train", "dev", "test")})
    placeholders: tuple[tuple[str, str], ...] = ()  # (old, new): text outside T5's vocabulary, and its replacement


def data_root(data_dir: str) -> Path:
    """Returns the directory of prepared data sets: `data_dir`, else $TFDS_DATA_DIR or ~/tensorflow_datasets."""
    with extra("data", "data.data_dir"):
        import tensorflow_datasets as tfds

    return Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()


class PublishedTask(Task):
    """The task of a data set that `pipejax data prepare` wrote. An example is read on access."""

    def __init__(self, published: Published, config: DataConfig) -> None:
        self.published, self.metric = published, config.metric or published.metric
        self.template = published.source(_Braces())
        fields = Template(self.template, key="template").fields
        self._document = fields if HEADLINES[self.metric] == "present_f1@M" else ()
        self._data_dir = config.data_dir

    def bounded(self, config: Config) -> Config:
        """Returns the config with the separator and the bounds that suit the data set."""
        published = self.published
        data = dataclasses.replace(config.data, max_target=published.max_target, separator=published.separator)
        return dataclasses.replace(config, data=data, grid=published.grid)

    def examples(self, split: str) -> Sequence[Example]:
        """Returns the examples of a split; empty if the data set lacks it."""
        source = self._source(self.published.splits[split])
        return PreparedExamples(source, functools.partial(self._example, split)) if source is not None else []

    def source(self, value: Object, place: str) -> str:
        """Returns the record's "source" unchanged if it has one, else the source made of its fields as in training."""
        if "source" in value:
            return text_of(value, "source", place)
        return plain_text(self.published.source(_Fields(value, place)), self.published.placeholders)

    def _source(self, split: str) -> Sequence[Record] | None:
        """Returns the prepared records of a split, or None if it is absent or empty.

        Raises:
          UserError: the data set is not prepared, or has another file format.
        """
        with extra("data", f"data.task={self.published.name}"):
            import tensorflow_datasets as tfds

        root = data_root(self._data_dir)
        directory = root / self.published.directory
        if look(directory / "dataset_info.json", "data.data_dir:") != "file":
            raise UserError(
                "data.data_dir",
                found=f"no {self.published.directory} in {root}",
                expected=f"what `pipejax data prepare {self.published.name}` writes",
            )
        builder = tfds.builder_from_directory(str(directory))
        form = builder.info.file_format
        if form != tfds.core.FileFormat.ARRAY_RECORD:
            raise UserError(directory, found=f"the format {form and form.value}", expected="array_record")
        if split not in builder.info.splits or not builder.info.splits[split].num_examples:
            return None
        source: Sequence[Record] = builder.as_data_source(split=split)
        return source

    def _example(self, split: str, index: int, raw: Record) -> Example:
        # TFDS returns text as bytes, and a list of texts as a list or array of bytes.
        record: Record = {k: x.decode() if isinstance(x, bytes) else [y.decode() for y in x] for k, x in raw.items()}
        spell = functools.partial(plain_text, placeholders=self.published.placeholders)
        rows = (spell(row) for row in self.published.targets(record))
        name = record.get("id") or f"{split}-{index}"
        document = spell(" ".join(record[field] for field in self._document))
        return Example(name, spell(self.published.source(record)), tuple(row for row in rows if row), document=document)


class _Fields(Record):
    """A user's record. Reading a field that is absent or not text raises a UserError that names the place."""

    def __init__(self, value: Object, place: str) -> None:
        super().__init__(value)
        self._place = place

    def __getitem__(self, key: str) -> str:
        return text_of(dict(self), key, self._place)


class _Braces(dict[str, str]):
    """A record in which the value of every field is its name in braces; its source is the template of all sources."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"
