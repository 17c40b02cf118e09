"""The training loop, for fine-tuning and training from scratch with the pipelined or the sequential method.

Read the module from top to bottom: `fit` is the whole loop, and `Run` holds the operations that it calls.
"""

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import jax

from pipejax import config as config_lib
from pipejax import methods, registry
from pipejax.checkpoint import Best, Store
from pipejax.checkpoint.fingerprint import digest, fingerprints
from pipejax.config import Config
from pipejax.data import make_task
from pipejax.data.batches import Batch, Share, TrainingBatches, choose_shapes, pack_size, prefetch
from pipejax.data.encoding import answered
from pipejax.data.examples import Example, Stream, fingerprint
from pipejax.data.own_files import FilesTask
from pipejax.data.shapes import EVERY, Shapes
from pipejax.metrics import require
from pipejax.model import dropout, sharding
from pipejax.model.auxiliary import split
from pipejax.system import Tree, distributed, environment, trials
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress
from pipejax.training.examiner import Examiner
from pipejax.training.monitoring import Clock, Window, warn_of_examples
from pipejax.training.optimizer import warmup
from pipejax.training.run_directory import RunDirectory
from pipejax.training.run_log import Line
from pipejax.training.start import Start, start_run
from pipejax.training.step import items_of
from pipejax.training.stop import Stop

logger = logging.getLogger(__name__)


def fit(
    config: Config, workdir: str | Path, *, given: Mapping[str, Sequence[Example]] | None = None, profile: int = 0
) -> int:
    """Trains until `train.steps`, starting from the newest intact step in `workdir` or, without one, from step 0.

    Args:
      config: the experiment.
      workdir: the run's directory.
      given: examples for the splits "train" and "dev"; an absent split is read by the config's task.
      profile: the number of steps to trace into WORKDIR/profile, from the third step of this call on.

    Returns:
      0 on success; 1 if the last or the best checkpoint could not be written; or 128 + the number of the signal that
      stopped the run between two steps or during an evaluation. The run then has a checkpoint of its last step.

    Raises:
      UserError: the config, the data, the starting checkpoint or the directory cannot be used.
    """
    require_method(config)
    methods.check_training(config)
    trials.try_kernels_early(trains=True)
    environment.check_environment()
    examples = Examples.of(config, given)
    with contextlib.closing(Stop()) as stop, RunDirectory(workdir) as directory:
        place, keep, every = directory.path / "checkpoints", config.train.keep_checkpoints, config.train.keep_every
        store = Store(place, keep=keep, keep_every=every, writable=True)
        start = start_run(config, directory, store, examples.fingerprints)
        if start.step:
            store.retire(start.step)
        # On resume, an evaluation of this step may be due by the new intervals, or by the old ones if the run was
        # stopped during it. The log then has no evaluation of this step.
        configs = [c for c in (start.trainer.config, start.before) if c] if start.step and len(examples.dev) else []
        owed = any(_evaluates_at(start.step, c) for c in configs) and not directory.has("evaluation", start.step)
        if start.step >= config.train.steps and not owed:
            store.close()
            directory.finish(_last_line("end", start.step, start.state.params, {}))
            wanted = f"train.steps = {config.train.steps}"
            logger.info(f"already trained for {start.step} steps, of {wanted}; nothing to do")
            return 0
        with distributed.fail_together(UserError):
            ends = start.trainer.model.config.end_token_ids
            trained = answered(examples.train, start.tokenizer, config.data.empty_targets, ends)
        examples = dataclasses.replace(examples, train=trained)
        with Run(start, examples, directory, store, stop, profile=profile) as run:
            if owed:
                run.evaluate()
            while not run.is_over():
                run.make_step()
                # The log is written before the checkpoint, so that a run that resumes from the checkpoint does not log
                # this step twice.
                run.log_if_due()
                # The evaluation comes before the checkpoint as well: a run killed during the evaluation repeats it from
                # the checkpoint before, and a run stopped during it catches up on resume.
                if run.evaluation_is_due():
                    run.evaluate()
                run.save_if_due()
                run.progress.add(1, run.note)
            run.log_the_rest()
        return run.end()


def require_method(config: Config) -> None:
    """Raises a UserError if the config names no method to train."""
    if config.method is None and config.train.method == "none":
        raise UserError("train.method", found="'none'", expected="pipelined or sequential")


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples that a run trains on, and the examples for its evaluations."""

    train: Sequence[Example]
    dev: Sequence[Example]
    # By name: "data", the training examples; "data_whole", all of them, if they are in memory; "dev".
    fingerprints: dict[str, str]

    @classmethod
    def of(cls, config: Config, given: Mapping[str, Sequence[Example]] | None = None) -> "Examples":
        """Returns the given examples, and reads the absent splits by the config's task.

        Checks that all processes have the same examples.

        Raises:
          UserError: there are no training examples, a split cannot be read, or the processes differ.
        """
        with distributed.fail_together(UserError):
            task = make_task(config.data, config.grid.row_names)

            def examples_of(split: str) -> Sequence[Example]:
                if given and split in given:
                    return given[split]
                if split == "dev" or not config.data.stream:
                    return task.examples(split)
                if not isinstance(task, FilesTask):
                    raise UserError(
                        "data.stream",
                        found=f"a stream with data.task = {config.data.task}",
                        expected="data.task = jsonl or csv",
                    )
                return task.stream() if task.has(split) else []

            train, dev = examples_of("train"), examples_of("dev")
            if len(dev):
                require(config.data.metric or task.metric)
            if not len(train):
                raise UserError("data.train", found="nothing", expected="the examples to train on")
            most = config.train.evaluate_examples
            names = train.names if isinstance(train, Stream) else ()
            prints = {"data": fingerprint(train, names=names), "dev": fingerprint(dev[:most] if most else dev)}
            if isinstance(train, list):
                prints["data_whole"] = fingerprint(train, None)
        distributed.check_same(config_lib.to_json(config), "the config")
        distributed.check_same(prints.get("data_whole", prints["data"]), "data.train")
        distributed.check_same(prints["dev"], "data.dev")
        return cls(train, dev, prints)


class Run:
    """A training run in progress: makes the steps, and the logging, evaluations and checkpoints that become due."""

    def __init__(
        self, start: Start, examples: Examples, directory: RunDirectory, store: Store, stop: Stop, *, profile: int
    ) -> None:
        self.trainer, self.state, self.step = start.trainer, start.state, start.step
        self.config = config = start.trainer.config
        self.directory, self.store, self.stop = directory, store, stop
        self.saved = start.step  # the newest step that was passed to the store
        self.evaluates = len(examples.dev) > 0
        self.examined = True  # whether the last evaluation was completed
        self.clock = Clock()
        directory.begin(config, start.tokenizer, start.step, examples.fingerprints)
        tracked = config.train.tensorboard or config.train.wandb or config.train.mlflow
        kinds = [registry.find(registry.TRACKERS)] if tracked else []
        self.trackers = [kind(config.train, directory.path, start.step, start.run) for kind in kinds]
        assert config.model is not None
        with self.clock("data"):
            if start.step == 0:
                warn_of_examples(examples.train, start.tokenizer, config)
            if (shapes := start.shapes) is None:
                # Process 0 chooses for all processes: the choice compares sums of floats, which other kinds of CPUs may
                # round differently.
                chosen = choose_shapes(examples.train, start.tokenizer, config, config.model)
                shapes = Shapes.from_json(distributed.same(chosen.to_json()))
            self.shapes = shapes
        best = Best(directory.path / "best", config, examples.fingerprints) if self.evaluates else None
        self.examiner = Examiner(
            config, self.trainer.dev_loss, self.shapes, examples.dev, start.tokenizer, directory, best, self.write
        )
        self.exchange = distributed.Exchange()
        rows = sharding.own_rows(self.trainer.mesh, config.train.batch_size // pack_size(config.train))
        share = Share(jax.process_index(), jax.process_count(), rows, self.exchange)
        drawn = TrainingBatches(examples.train, start.tokenizer, config, config.model, self.shapes, share)
        self.batches = prefetch(drawn, start.step)
        count = 0 if isinstance(examples.train, Stream) else len(examples.train)
        self._log_model_and_batches(count)
        shown = distributed.first()
        self.progress = Progress("training", config.train.steps, unit="step", start=start.step, shown=shown)
        devices = list(self.trainer.mesh.devices.flat)
        self.window = Window(config, count, self.write, self.progress, devices, self.clock)
        self.trace_steps(profile)
        begun: dict[str, object] = {"init": start.init, "run": start.run, "dropout": dropout.VERSION}
        begun |= {} if start.conversion is None else {"conversion": start.conversion}
        self.metadata = {**examples.fingerprints, "shapes": self.shapes.to_json(), **begun}
        self.note = ""

    def trace_steps(self, count: int) -> None:
        """Schedules a profiler trace of `count` steps, from the third step that follows on."""
        self.profile, self.profiled = contextlib.ExitStack(), range(self.step + 2, self.step + 2 + count)

    def is_over(self) -> bool:
        """Returns whether the run ends here. All processes must call it.

        A run ends after `train.steps`, after a signal, and when `train.patience` is exhausted.
        """
        return self.step >= self.config.train.steps or self.stop.asked() or self.examiner.lost_patience

    def make_step(self) -> None:
        """Dispatches one update; the devices may still compute it when this method returns."""
        self.window.settle()
        with self.clock("data"):
            batch = next(self.batches)
            arrays = sharding.put_batch(batch.arrays, self.trainer.mesh)
        program = self._program(batch)
        # Several processes would have to compile in the same order, so they do not compile ahead.
        if not distributed.several():
            self.trainer.prepare(self.shapes.in_use(min(self.step + EVERY, self.config.train.steps - 1)))
        if self.step == self.profiled.start and self.profiled:
            self.profile.enter_context(jax.profiler.trace(self.directory.path / "profile"))
        self.state, metrics = program(self.state, arrays, self.trainer.dropout_key(self.step + 1))
        self.step += 1
        # The save overlapped with this one step and is completed now, so a crash loses at most one interval.
        if self.step == self.saved + 1:
            jax.block_until_ready(metrics)
            with self.clock("checkpoint"):
                self.store.settle()
        if self.step == self.profiled.stop and self.profiled:
            jax.block_until_ready(metrics)
            self.profile.close()
        self.window.add(self.step, batch, metrics)
        if self.evaluation_is_due() or self._save_is_due():
            # So that the time of the step is not counted as part of the evaluation or the save.
            jax.block_until_ready(metrics)

    def log_if_due(self) -> None:
        """Writes a line to metrics.jsonl every `train.log_every` steps and after the last step."""
        self.note = ""
        if self.step == self.config.train.steps or self.step % self.config.train.log_every == 0:
            with distributed.fail_together(UserError):
                values = self.window.flush()
            loss = f"loss {values['loss']:.4f}" if values["loss"] is not None else "no finite loss"
            self.note = loss + (f", epoch {values['epoch']:.1f}" if "epoch" in values else "")

    def log_the_rest(self) -> None:
        """Logs the steps since the last line, when the loop has ended between two lines."""
        if self.window.steps:
            with distributed.fail_together(UserError):
                self.window.flush()

    def evaluate(self) -> None:
        """Evaluates the dev split at the current step; `self.examined` then says whether it was completed."""
        of = f"{len(self.examiner.examples)} examples"
        with self.clock("evaluation"), self.progress.aside("evaluating", of) as reach:
            self.examined = self.examiner.evaluate(self.step, self.state.params, self.progress, self.stop.asked, reach)

    def save_if_due(self) -> None:
        """Starts saving a checkpoint every `train.checkpoint_every` steps; the writing overlaps with the next step."""
        if self._save_is_due():
            with self.clock("checkpoint"):
                if self._save():
                    self.saved = self.step

    def write(self, values: Line) -> None:
        """Writes a line to metrics.jsonl and its numbers to the trackers."""
        self.directory.log_metrics(values)
        for tracker in self.trackers:
            tracker.write(values)

    def end(self) -> int:
        """Writes the last checkpoint and the last line of the log, and returns the exit code as in `fit`."""
        with self.clock("checkpoint"):
            done = self.store.settle()
            if self.saved < self.step or not done:
                done = self._save(wait=True)
            self.store.close()
            best = self.examiner.best is None or self.examiner.best.close()
        self.clock.lap()
        steps = self.config.train.steps
        ended = (self.step >= steps or self.examiner.lost_patience) and self.examined
        self.write(_last_line("end" if ended else "stopped", self.step, self.state.params, self.clock.totals))
        self._close_trackers()
        self.progress.close()
        if not done:
            logger.error(f"step {self.step} was not written; the same command resumes from the checkpoint before")
            return 1
        if not best:
            logger.error("the best step so far is not in best/; it was not written before the run ended")
            return 1
        logger.info("time: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.clock.totals.items()))
        if self.stop.agreed and not ended:
            by = signal.Signals(self.stop.agreed).name
            logger.info(f"stopped by {by} at step {self.step}; the same command resumes from there")
            return 128 + self.stop.agreed
        if self.step < steps:
            patience = self.config.train.patience
            logger.info(f"no better evaluation in train.patience = {patience}; training ends before train.steps")
        reached = f" ({self.progress.note})" if self.progress.note else ""
        logger.info(f"trained for {self.step} steps{reached}; checkpoints in {self.store.directory}")
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends the background work; after an error also completes a pending save and closes the displays."""
        if error is None:
            self.exchange.close()
        else:
            # After an error of this process alone, the other processes would not join the save, which would never end.
            if not distributed.several() or distributed.shared(error):
                self.store.settle()
            if not distributed.lost(error):  # a process that is gone cannot be notified
                self.exchange.close()
            self.progress.close()
        self.profile.close()
        self.trainer.close()
        if error is not None:
            self._close_trackers()

    def _close_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.close()

    def evaluation_is_due(self) -> bool:
        """Returns whether an evaluation is due: every `train.evaluate_every` steps and after the last step."""
        return self.evaluates and _evaluates_at(self.step, self.config)

    def _save_is_due(self) -> bool:
        return self.step % self.config.train.checkpoint_every == 0 and self.step < self.config.train.steps

    def _save(self, *, wait: bool = False) -> bool:
        return self.store.save(self.step, items_of(self.state), config=self.config, metadata=self.metadata, wait=wait)

    def _program(self, batch: Batch) -> jax.stages.Compiled:
        """Returns the compiled step for the shapes of this batch; shows a note while it is compiled."""
        shapes = {name: x.shape for name, x in batch.arrays.items()}
        if self.trainer.is_ready(shapes):
            return self.trainer.program(shapes)
        lengths = f"for sources of {shapes['source'][1]} tokens and targets of {shapes['inputs'][1]}"
        on_cpu = jax.default_backend() == "cpu"
        first = "" if on_cpu else ", a minute or two for T5-Base, seconds if a run before left it in the cache"
        with self.clock("compile"), self.progress.aside("compiling", lengths, first):
            return self.trainer.program(shapes)

    def _log_model_and_batches(self, examples: int) -> None:
        """Logs the size of the model, the number of examples, the devices and the batch shapes."""
        train, trainer, params = self.config.train, self.trainer, self.state.params
        size, own = (sum(x.size for x in jax.tree.leaves(tree)) / 1e6 for tree in (params, trainer.trained(params)))
        trains = f" ({own:.2f} M are trained)" if own < size else ""
        if self.step == 0 and warmup(train) >= train.steps:
            logger.warning(
                f"train.warmup_steps: found {warmup(train)}; expected fewer than train.steps "
                f"({train.steps}); otherwise the full learning rate is not reached"
            )
        where = f"{trainer.mesh.size} x {jax.devices()[0].device_kind}"
        found = f"{examples or 'streamed'} training examples"
        logger.info(f"{size:.1f} M parameters{trains}, {found}, {trainer.model.dtype} on {where}")
        most, first = len(self.shapes.in_use(train.steps)), len(self.shapes.in_use(0))
        why = f"; a further shape would not save its time of compilation in {train.steps} steps"
        logger.info(
            ("all batches are padded to one shape" if most == 1 else f"batches are padded to one of {most} shapes")
            + (f" (one of {first} at first)" if first < most else "")
            + "; a shape is compiled once, before its first step"
            + (why if self.step == 0 and len(self.shapes.pairs) < train.shapes else "")
        )


def _evaluates_at(step: int, config: Config) -> bool:
    return step % config.train.evaluate_every == 0 or step == config.train.steps


def _last_line(event: str, step: int, params: Tree, seconds: dict[str, float]) -> Line:
    params_fp = digest(fingerprints(split(params)[0]))
    return {"event": event, "step": step, "seconds": dict(seconds), "params_fp": params_fp}
