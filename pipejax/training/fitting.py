"""Training from Python: the implementation of `pipejax.fit`."""

import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipejax import config as config_lib
from pipejax import methods
from pipejax.config import Config, DataConfig, Overrides
from pipejax.data import OWN_FILES
from pipejax.data.examples import Example
from pipejax.data.formats import rows_in
from pipejax.data.lines import BadLines
from pipejax.data.own_files import FilesTask
from pipejax.methods import Method
from pipejax.system import compile_cache
from pipejax.system.errors import UserError
from pipejax.system.fields import shown_value
from pipejax.training.train_command import require_libraries


def train_run(
    config: Config | str | Path | Mapping[str, object],
    workdir: str | Path,
    *,
    train: object,
    dev: object,
    overrides: Overrides,
    method: Method | str | None = None,
) -> Path:
    """Trains a run in `workdir` and returns its path; see `pipejax.fit` for the arguments.

    Raises:
      UserError: a setting or the data cannot be used, or the last or the best checkpoint could not be written.
      KeyboardInterrupt: SIGINT stopped the training; the checkpoint of the last step is written.
      SystemExit: another signal stopped the training, with the code 128 + signal.
    """
    if isinstance(config, Mapping):
        config = config_lib.override(Config(), config, where="config")
    elif isinstance(config, str | os.PathLike):
        config = config_lib.load(Path(config))
    elif not isinstance(config, Config):
        raise UserError(
            "config", found=shown_value(config), expected="a Config, the path of one, or a dict of settings"
        )
    if method is not None:
        config = methods.choose(config, method)
    config = config_lib.override(config, {}, where="config")
    config = config_lib.override(config, overrides, where="overrides")
    given: dict[str, list[Example]] = {}
    for split, source in (("train", train), ("dev", dev)):
        if isinstance(source, str | os.PathLike):
            if config.data.task not in OWN_FILES:
                raise UserError(
                    split,
                    found=f"a file, which is not read with data.task = {config.data.task}",
                    expected="data.task = jsonl or csv",
                )
            config = config_lib.override(config, {f"data.{split}": source}, where=split)
        elif source is not None:
            given[split] = examples_of(source, split, config.data, config.grid.row_names)
            # A cell of a record in memory may be a list. A cell of a CSV file may not, and the task `jsonl` also
            # accepts files named .csv, so the task is set explicitly and the path is cleared.
            data = dataclasses.replace(config.data, task="jsonl")
            data = dataclasses.replace(data, train="") if split == "train" else dataclasses.replace(data, dev="")
            config = dataclasses.replace(config, data=data)
    require_libraries()
    from pipejax.training import loop

    compile_cache.use_cache()
    code = loop.fit(config, workdir, given=given)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt(f"{workdir}; repeat the call to continue from the written checkpoint")
    if code >= 128:
        raise SystemExit(code)
    if code:
        raise UserError(
            workdir, "the last or the best step was not written, as a logged line reports; repeat the call to continue"
        )
    return Path(workdir)


def examples_of(source: object, split: str, data: DataConfig, row_names: Sequence[str] = ()) -> list[Example]:
    """Returns the examples of records in memory.

    A record without an id gets its number, counted from 1, as a line of a file does.
    """
    if data.task not in OWN_FILES:
        raise UserError(split, found=f"records in memory with data.task = {data.task}", expected="data.task = jsonl")
    if data.split:
        raise UserError(
            "data.split", found=f"{data.split!r} with records in memory", expected="no split; pass train and dev"
        )
    if split == "train" and data.stream:
        raise UserError(
            "data.stream",
            found=f"{data.stream} with records in memory",
            expected="0, because records in memory need no stream",
        )
    rows = list(rows_in(source, split))
    if not rows:
        raise UserError(split, found="no records", expected="at least one")
    if all(isinstance(row, Example) for row in rows):
        return rows
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"{split}:{number}", found=shown_value(row), expected="a record, such as a dict")
    bad, placed = BadLines(split, skip=data.skip_bad), ((f"{split}:{i}", row) for i, row in enumerate(rows, start=1))
    examples = FilesTask(dataclasses.replace(data, task="jsonl"), row_names).examples_of(placed, split, bad)
    bad.end(len(examples))
    return examples
