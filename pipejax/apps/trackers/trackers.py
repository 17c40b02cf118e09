"""Experiment trackers, which get copies of the log's numbers; metrics.jsonl remains authoritative."""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from pipejax.config import TrainConfig
from pipejax.system import distributed
from pipejax.system.errors import UserError, first_line
from pipejax.system.extras import module
from pipejax.system.files import writing
from pipejax.training.run_log import Line

logger = logging.getLogger(__name__)

Write = Callable[[int, dict[str, float]], None]


class Trackers:
    """The trackers of the config, in the first process only. A tracker or a value that fails does not stop training."""

    def __init__(self, config: TrainConfig, directory: Path, step: int, run: str) -> None:
        self._writers, self._ends = dict[str, Write](), dict[str, Callable[[], None]]()
        self._refused_values = set[str]()  # names of values that a tracker has already refused
        if not distributed.first():
            return
        if config.tensorboard:
            name = "TensorBoard"
            self._writers[name], self._ends[name] = _tensorboard(directory / "tensorboard", step)
        if config.wandb:
            self._writers["W&B"], self._ends["W&B"] = _wandb(config.wandb, directory, run)
        if config.mlflow:
            self._writers["MLflow"], self._ends["MLflow"] = _mlflow(config.mlflow, directory, run)

    def write(self, values: Line) -> None:
        """Sends the numbers of a log line to each tracker.

        After a failure, the values are sent one by one. Values that the tracker refuses are left out with a warning.
        If the first two values both fail, the tracker itself is unavailable and is dropped.
        """
        numbers = {
            name_of(values["event"], name): float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and name != "step"
        }
        for board, write in [*self._writers.items()] if numbers else ():
            lost, failure = list[str](), _error_of(write, values["step"], numbers)
            for place, (name, value) in enumerate(numbers.items() if failure else ()):
                lost += [name] if _error_of(write, values["step"], {name: value}) else []
                if is_down := len(lost) == place + 1 == 2:  # the first two values failed: the tracker is unavailable
                    del self._writers[board]
                    break
            if lost and not self._refused_values.issuperset(lost):
                self._refused_values |= {*lost}
                end = "the run continues without it" if is_down else f"left out: {', '.join(lost)}"
                logger.warning(f"{board}: {failure}; {end}")

    def close(self) -> None:
        """Ends the trackers' runs; logs the errors."""
        for name, end in self._ends.items():
            if failure := _error_of(end):
                logger.warning(f"{name}: {failure}")
        self._ends.clear()


def name_of(event: str, name: str) -> str:
    """Returns the name of a value on all trackers. Characters that a tracker refuses are replaced.

    MLflow refuses "@"; W&B and TensorBoard refuse other signs.
    """
    return re.sub(r"[^A-Za-z0-9_/]", "_", f"{event}/{name}".replace("@", "_at_"))


def _error_of(act: Callable[..., None], *arguments: object) -> str:
    """Calls a tracker's function and returns its error as one line, or "" if it succeeds.

    The function catches all exceptions, because the trackers hold only copies of the log.
    """
    try:
        act(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


def _tensorboard(directory: Path, step: int) -> tuple[Write, Callable[[], None]]:
    """Returns the functions that write values as TensorBoard events, and that close the file.

    The functions do not use the writer class of tensorboardX, which has a thread, because waiting for that thread
    blocks for a long time when the disk is full.
    """
    files = module("tensorboardX.event_file_writer", "tensorboard", "train.tensorboard")
    events = module("tensorboardX.proto.event_pb2", "tensorboard", "train.tensorboard")
    summary = module("tensorboardX.summary", "tensorboard", "train.tensorboard")
    with writing(directory):
        directory.mkdir(exist_ok=True)
        writer = files.EventsWriter(str(directory / "events"))
        # This event hides the values of steps that were lost before a resume.
        started = events.SessionLog(status=events.SessionLog.START)
        writer.write_event(events.Event(wall_time=time.time(), step=step + 1, session_log=started))

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.write_event(events.Event(wall_time=time.time(), step=step, summary=summary.scalar(name, value)))
        writer.flush()

    return write, writer.close


def _wandb(project: str, directory: Path, name: str) -> tuple[Write, Callable[[], None]]:
    """Starts or continues the run of this id in W&B; returns the functions that write values and that end it.

    Raises:
      UserError: W&B is not ready, as without a key or a network.
    """
    wandb = module("wandb", "wandb", "train.wandb")
    try:
        run = wandb.init(project=project, name=directory.name, dir=str(directory), id=name, resume="allow")
        # W&B refuses values with a step before the last one in its own count, and a resumed run has such steps. So the
        # step is a value of its own.
        for event in ("train", "evaluation"):
            run.define_metric(f"{event}/*", step_metric="step")
    except Exception as error:  # such as a missing key or network
        raise UserError("train.wandb", f"{' '.join(str(error).split())[:200]}", expected="W&B to be ready") from error
    return lambda step, values: run.log({"step": step} | values), run.finish


def _mlflow(experiment: str, directory: Path, name: str) -> tuple[Write, Callable[[], None]]:
    """Starts or continues the run of this id in MLflow; returns the functions that write values and that end it.

    Raises:
      UserError: MLflow is not ready, as without a server.
    """
    mlflow = module("mlflow", "mlflow", "train.mlflow")
    try:
        mlflow.set_experiment(experiment)
        found = mlflow.search_runs(filter_string=f"tags.pipejax = '{name}'", output_format="list", max_results=1)
        run = found[0].info.run_id if found else None
        mlflow.start_run(run_id=run, run_name=None if run else directory.name, tags={"pipejax": name})
    except Exception as error:  # such as an absent server or missing rights
        raise UserError("train.mlflow", first_line(error)[:200], expected="MLflow to be ready") from error
    return lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run
