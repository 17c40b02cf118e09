"""Data sets as tasks, their examples as text and as token ids, and padded batches. Nothing here imports JAX."""

from pipejax.config import DataConfig
from pipejax.data import cnn_dailymail, kp20k, kptimes, msqa, pubmed, sumpubmed, wikihow, wikihowqa
from pipejax.data.demo import DemoTask
from pipejax.data.examples import Task
from pipejax.data.own_files import FilesTask
from pipejax.data.published import PublishedTask
from pipejax.system.errors import UserError, did_you_mean

# In the order of the paper's Table 1, which has no SumPubMed and no wikiHow.
PUBLISHED = {
    module.TASK.name: module.TASK
    for module in (msqa, kp20k, kptimes, wikihowqa, cnn_dailymail, pubmed, sumpubmed, wikihow)
}
OWN_FILES = ("jsonl", "csv")  # tasks whose splits are files that the config names
TASKS = ("demo", "demo_long", *OWN_FILES, *PUBLISHED)


def make_task(config: DataConfig) -> Task:
    if config.task in OWN_FILES:
        return FilesTask(config)
    if config.task in ("demo", "demo_long"):
        return DemoTask(long=config.task == "demo_long")
    if config.task in PUBLISHED:
        return PublishedTask(PUBLISHED[config.task], config)
    raise UserError(
        f"data.task: found {config.task!r}; expected one of {', '.join(TASKS)}{did_you_mean(config.task, TASKS)}"
    )
