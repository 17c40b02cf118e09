"""Data sets as tasks, their examples as text and as token ids, and padded batches.

Nothing in this package imports JAX.
"""

from collections.abc import Sequence

from pipejax import registry
from pipejax.config import DataConfig
from pipejax.data.examples import Task
from pipejax.system.errors import UserError, did_you_mean

OWN_FILES = ("jsonl", "csv")  # tasks whose splits are files named in the config
PAPERS, TASKS = registry.PAPERS, (*registry.TASKS,)


def make_task(config: DataConfig, row_names: Sequence[str] = ()) -> Task:
    """Returns the task of a config.

    Args:
      config: the data settings.
      row_names: `grid.row_names`, the beginnings of rows that are columns.
    """
    if config.task not in TASKS:
        raise UserError(
            "data.task",
            found=f"{config.task!r}",
            expected=f"one of {', '.join(TASKS)}",
            hint=did_you_mean(config.task, TASKS),
        )
    task: Task = registry.find(registry.TASKS[config.task])(config, row_names)
    return task
