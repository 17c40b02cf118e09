"""Data sets as tasks, their examples as text and as token ids, and padded batches.

Nothing in this package imports JAX.
"""

from collections.abc import Sequence

from pipejax.config import DataConfig
from pipejax.data.demo import DemoTask
from pipejax.data.examples import Task
from pipejax.data.own_files import FilesTask
from pipejax.system.errors import UserError, did_you_mean

OWN_FILES = ("jsonl", "csv")  # tasks whose splits are files named in the config
# tasks of apps/papers
PAPERS = ("msqa", "kp20k", "kptimes", "wikihowqa", "cnn_dailymail", "pubmed", "sumpubmed", "wikihow")
TASKS = ("demo", "demo_long", *OWN_FILES, *PAPERS)


def make_task(config: DataConfig, row_names: Sequence[str] = ()) -> Task:
    """Returns the task of a config.

    Args:
      config: the data settings.
      row_names: `grid.row_names`, the beginnings of rows that are columns.
    """
    if config.task in OWN_FILES:
        return FilesTask(config, row_names)
    if config.task in ("demo", "demo_long"):
        return DemoTask(long=config.task == "demo_long")
    if config.task in PAPERS:
        from pipejax.apps.papers.data_sets import PUBLISHED
        from pipejax.apps.papers.published import PublishedTask

        return PublishedTask(PUBLISHED[config.task], config)
    raise UserError(
        f"data.task: found {config.task!r}; expected one of {', '.join(TASKS)}{did_you_mean(config.task, TASKS)}"
    )
