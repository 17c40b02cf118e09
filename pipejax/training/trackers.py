"""Copies of the log's numbers where people look at curves; metrics.jsonl stays the truth."""

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from pipejax.config import TrainConfig
from pipejax.system import distributed
from pipejax.system.errors import UserError, first_line
from pipejax.system.extras import module
from pipejax.system.files import absolute, writing
from pipejax.training.run_log import Line

logger = logging.getLogger(__name__)

Write = Callable[[int, dict[str, float]], None]


class Trackers:
    """The trackers of the config, in the first process alone. A board that fails is dropped; training goes on."""

    def __init__(self, config: TrainConfig, directory: Path, step: int) -> None:
        """Opens them; curves go on after `step`."""
        self._writers, self._ends = dict[str, Write](), dict[str, Callable[[], None]]()
        if not distributed.first():
            return
        if config.tensorboard:
            name = "TensorBoard"
            self._writers[name], self._ends[name] = _tensorboard(directory / "tensorboard", step)
        if config.wandb:
            self._writers["W&B"], self._ends["W&B"] = _wandb(config.wandb, directory)
        if config.mlflow:
            self._writers["MLflow"], self._ends["MLflow"] = _mlflow(config.mlflow, directory)

    def write(self, values: Line) -> None:
        """The numbers of one line of the log."""
        numbers = {
            f"{values['event']}/{name}": float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and name != "step"
        }
        for name, write in list(self._writers.items()) if numbers else ():
            try:
                write(values["step"], numbers)
            except Exception as error:  # whatever a library may raise: it is only a copy
                del self._writers[name]
                logger.warning(
                    f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}; goes on without it"
                )

    def close(self) -> None:
        """Ends them; once is enough."""
        for name, end in self._ends.items():
            try:
                end()
            except Exception as error:  # as above
                logger.warning(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
        self._ends.clear()


def _tensorboard(directory: Path, step: int) -> tuple[Write, Callable[[], None]]:
    """Writes events itself: the library's own writer has a thread, and who waits for that on a full disk waits long."""
    files = module("tensorboardX.event_file_writer", "tensorboard", "train.tensorboard")
    events = module("tensorboardX.proto.event_pb2", "tensorboard", "train.tensorboard")
    summary = module("tensorboardX.summary", "tensorboard", "train.tensorboard")
    with writing(directory):
        directory.mkdir(exist_ok=True)
        writer = files.EventsWriter(str(directory / "events"))
        started = events.SessionLog(status=events.SessionLog.START)  # hides what a lost stretch left behind
        writer.write_event(events.Event(wall_time=time.time(), step=step + 1, session_log=started))

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.write_event(events.Event(wall_time=time.time(), step=step, summary=summary.scalar(name, value)))
        writer.flush()

    return write, writer.close


def _wandb(project: str, directory: Path) -> tuple[Write, Callable[[], None]]:
    wandb = module("wandb", "wandb", "train.wandb")
    name = _name_of(directory)
    try:
        run = wandb.init(project=project, name=directory.name, dir=str(directory), id=name, resume="allow")
        # Not by W&B's own count of steps: behind that nothing can be logged, and a resumed run goes on behind it.
        for event in ("train", "evaluation"):
            run.define_metric(f"{event}/*", step_metric="step")
    except Exception as error:  # no key, no network, ...
        raise UserError(f"train.wandb: {' '.join(str(error).split())[:200]}; expected W&B to be ready") from error
    return lambda step, values: run.log({"step": step} | values), run.finish


def _mlflow(experiment: str, directory: Path) -> tuple[Write, Callable[[], None]]:
    mlflow = module("mlflow", "mlflow", "train.mlflow")
    name = _name_of(directory)
    try:
        mlflow.set_experiment(experiment)
        found = mlflow.search_runs(filter_string=f"tags.pipejax = '{name}'", output_format="list", max_results=1)
        run = found[0].info.run_id if found else None
        mlflow.start_run(run_id=run, run_name=None if run else directory.name, tags={"pipejax": name})
    except Exception as error:  # no server, no rights, ...
        raise UserError(f"train.mlflow: {first_line(error)[:200]}; expected MLflow to be ready") from error
    return lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run


def _name_of(directory: Path) -> str:
    """The same for the same directory, so that a resumed run goes on in its own curve."""
    return hashlib.sha256(str(absolute(directory)).encode()).hexdigest()[:16]
