"""The published data sets of the paper, as tasks, and their preparation: `pipejax data prepare`."""

from collections.abc import Sequence
from pathlib import Path

from pipejax.apps.papers.data_sets import PUBLISHED
from pipejax.apps.papers.published import PublishedTask
from pipejax.config import DataConfig


def published_task(config: DataConfig, row_names: Sequence[str] = ()) -> PublishedTask:
    """Returns the task of the data set `config.task`, whose rows have no names."""
    return PublishedTask(PUBLISHED[config.task], config)


def prepare(task: str, *, manual_dir: str, data_dir: str) -> Path:
    """Writes a published data set in the form that training reads, and returns its directory.

    Args:
      task: the name of the data set, a key of `PUBLISHED`.
      manual_dir: the directory of the publisher's files.
      data_dir: the directory to write to; "": the default of TensorFlow Datasets.
    """
    from pipejax.apps.papers import builders

    return builders.prepare_data_set(PUBLISHED[task], manual_dir=manual_dir, data_dir=data_dir)
