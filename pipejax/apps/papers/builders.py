"""Prepares published data sets with TensorFlow Datasets (TFDS), without TensorFlow unless TFDS has to download.

TFDS registers a builder when its class is defined, so importing this module registers the builders that TFDS lacks.
"""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NoReturn

from pipejax.apps.papers.data_sets import KP20K, KPTIMES, MSQA, SUMPUBMED, WIKIHOWQA
from pipejax.apps.papers.manual import Manual
from pipejax.apps.papers.published import Published, Record, Records, data_root
from pipejax.system.errors import UserError
from pipejax.system.extras import command, extra
from pipejax.system.files import look
from pipejax.system.progress import Progress

with extra("data", "data prepare"):
    import tensorflow_datasets as tfds
    from tensorflow_datasets.datasets.scientific_papers import scientific_papers_dataset_builder as scientific_papers
    from tensorflow_datasets.summarization.cnn_dailymail import CnnDailymail
    from tensorflow_datasets.summarization.wikihow import Wikihow

logger = logging.getLogger(__name__)

_FEATURES: dict[type, Callable[[], object]] = {
    str: tfds.features.Text,
    list: lambda: tfds.features.Sequence(tfds.features.Text()),
}
_VERSION = tfds.core.Version("1.0.0")


class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[misc, call-arg]
    """The base class of the builders here. `_builder` adds the data set and the instructions that TFDS shows."""

    published: ClassVar[Published]

    def _info(self) -> tfds.core.DatasetInfo:
        features = {key: _FEATURES[kind]() for key, kind in self.published.fields.items()}
        return tfds.core.DatasetInfo(
            builder=self, disable_shuffling=True, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[tuple[str, Record]]]:
        return generators(self.published, Manual(dl_manager.manual_dir, expected=self.published.files))

    def _generate_examples(self) -> NoReturn:
        raise NotImplementedError("the generators are made with the splits")


def _builder(task: Published) -> type[Builder]:
    facts = {"VERSION": _VERSION, "MANUAL_DOWNLOAD_INSTRUCTIONS": task.files, "published": task}
    return type(task.name.capitalize(), (Builder,), {"__module__": __name__, **facts})


# The builders by the names of the data sets in TFDS. The last three are builders of TFDS.
BUILDERS = {
    **{task.name: _builder(task) for task in (MSQA, KP20K, KPTIMES, WIKIHOWQA, SUMPUBMED)},
    "cnn_dailymail": CnnDailymail,
    "scientific_papers": scientific_papers.Builder,
    "wikihow": Wikihow,
}
_FETCHED = ("cnn_dailymail", "scientific_papers")  # data sets that TFDS can download


def prepare_data_set(published: Published, *, manual_dir: str, data_dir: str) -> Path:
    """Writes a data set for `PublishedTask` and returns its directory.

    Args:
      published: the data set.
      manual_dir: the directory of the publisher's files; "": TFDS downloads them.
      data_dir: the directory of prepared data sets; "": the directory of TFDS.

    Raises:
      UserError: files are missing or invalid, or cannot be downloaded.
    """
    root = data_root(data_dir)
    directory = root / published.directory
    if look(directory / "dataset_info.json", "--data-dir:") == "file":
        logger.info(f"{directory}: already prepared (remove it to prepare it again)")
        return directory
    name, *config, _ = published.directory.split("/")
    options = {"config": config[0]} if config else {}
    with contextlib.redirect_stdout(None if manual_dir else sys.stderr):  # TFDS would print sizes that it does not know
        with _without_bucket():
            builder = BUILDERS[name](data_dir=str(root), file_format="array_record", **options)
        if manual_dir:
            splits = generators(published, Manual(manual_dir, expected=published.files))
            builder._split_generators = lambda dl_manager: splits
        elif name not in _FETCHED:
            raise UserError("--manual-dir", found="none", expected=f"a directory with {published.files}")
        elif importlib.util.find_spec("tensorflow") is None:
            raise UserError(
                published.name,
                found="no TensorFlow, which TFDS needs to download it",
                expected=f"TensorFlow ({command('prepare')}), or --manual-dir with {published.files}",
            )
        if manual_dir:
            tfds.disable_progress_bar()  # `_checked` shows progress instead
        download = tfds.download.DownloadConfig(manual_dir=manual_dir or None, try_download_gcs=False)
        try:
            builder.download_and_prepare(download_config=download)
        except OSError as error:
            raise UserError(directory, f"cannot be prepared ({error})") from error
    return directory


@contextlib.contextmanager
def _without_bucket() -> Iterator[None]:
    """Returns a context manager in which TFDS does not query its bucket for a data set.

    The query would create an empty directory.
    """
    looks = tfds.core.DatasetInfo.initialize_from_bucket
    tfds.core.DatasetInfo.initialize_from_bucket = lambda info: None
    try:
        yield
    finally:
        tfds.core.DatasetInfo.initialize_from_bucket = looks


def generators(published: Published, manual: Manual) -> dict[str, Iterator[tuple[str, Record]]]:
    """Returns the checked records of each split, with their keys."""
    return {split: _checked(split, records) for split, records in published.read(manual).items()}


def _checked(split: str, records: Records) -> Iterator[tuple[str, Record]]:
    """Yields (key, record).

    Raises:
      UserError: a key is repeated, or the split has no records.
    """
    seen: dict[str, str] = {}
    with contextlib.closing(Progress(f"preparing {split}", None, unit="record")) as progress:
        for place, key, record in records:
            if key in seen:
                raise UserError(f'{place}: "id"', found=f"{key!r} again; it was used in {seen[key]}")
            seen[key] = place
            yield key, record
            progress.add(1)
    if not seen:
        raise UserError(f"split {split!r}", found="no records", expected="at least one")
