"""Examples, tasks and batches. No JAX in here."""

from pipejax.config import DataConfig
from pipejax.data.core import Task
from pipejax.data.demo import DemoTask
from pipejax.data.jsonl import JsonlTask
from pipejax.errors import UserError

TASKS = ("demo", "jsonl")


def make_task(config: DataConfig) -> Task:
    """The task that the config names."""
    if config.task == "jsonl":
        return JsonlTask(config)
    if config.task == "demo":
        return DemoTask()
    raise UserError(f"data.task: found {config.task!r}; expected one of {', '.join(TASKS)}")
