"""Fine-tuning and training from scratch, with the pipelined or the sequential objective. Read it top to bottom."""

import dataclasses
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from pipejax import checkpoint, decoding
from pipejax import config as config_lib
from pipejax.checkpoint import Restored, Store
from pipejax.checkpoint.fingerprint import digest, fingerprints
from pipejax.config import Config
from pipejax.data import make_task
from pipejax.data.core import Batch, Part, TrainingBatches, choose_shapes, fingerprint, pack_size, prefetch
from pipejax.data.shapes import EVERY, Shapes
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference.generator import split_rows
from pipejax.metrics import require
from pipejax.model import sharding
from pipejax.system import distributed, environment
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress
from pipejax.training.monitoring import Clock, Examiner, Trace, Window
from pipejax.training.run_directory import RunDirectory, check_resume, resolve_model
from pipejax.training.step import Trainer, TrainState
from pipejax.training.trackers import Boards


@dataclasses.dataclass
class Start:
    """Where a run begins."""

    trainer: Trainer
    state: TrainState
    step: int  # updates already made
    tokenizer: Tokenizer
    before: Config | None = None  # of the run so far; its steps and intervals may have been others
    shapes: Shapes | None = None  # that its batches had so far


def begin(config: Config, directory: RunDirectory, store: Store, data: str, log: Callable[[str], None]) -> Start:
    """Order: the run's own newest good checkpoint, then `train.init_from`, then random weights; says which.

    `data` stands for the training examples: they must be those that the run began with.
    """
    trainer: Trainer | None = None

    def expect(saved: Config) -> dict[str, Any]:
        nonlocal trainer
        wanted = config if config.model is not None else dataclasses.replace(config, model=saved.model)
        check_resume(saved, wanted, directory.path)
        if saved.train.evaluate_examples != wanted.train.evaluate_examples and trainer is None:
            log("train.evaluate_examples: found another number than before; best/ goes by the scores of both alike")
        if saved.train.steps != wanted.train.steps and wanted.train.schedule != "constant" and trainer is None:
            schedule = f"the {wanted.train.schedule} schedule now ends there"
            log(f"train.steps: {saved.train.steps} -> {wanted.train.steps}; {schedule}")
        trainer = trainer or Trainer(wanted)
        return trainer.templates()

    had_steps = distributed.same(bool(store.steps()))
    own = store.newest(expect, log=log, set_aside=True)
    if had_steps and own is None:
        log(f"{store.directory}: found no good step; training starts again from its beginning")
    if own is not None and trainer is not None:
        with distributed.together(UserError):
            if own.metadata.get("data", data) != data:
                raise UserError(
                    f"{directory.path}: data.train: found other examples than the run was trained on so far; expected "
                    "the same on resume; take another --workdir for another experiment"
                )
        log(f"resuming at step {own.step} ({own.path})")
        state = TrainState(own.items["params"], own.items["state"])
        with distributed.together(UserError):
            tokenizer = Tokenizer.load(own.tokenizer_files() or directory.path / "tokenizer")
        shapes = Shapes.from_json(own.metadata["shapes"]) if "shapes" in own.metadata else None
        return Start(trainer, state, own.step, tokenizer, own.config, shapes)
    with distributed.together(UserError):
        trainer, tokenizer, origin = _prepare(config, log)
    state = trainer.fresh(origin.items["params"] if origin else None)
    log(
        f"starting from {config.train.init_from} (its step {origin.step})"
        if origin
        else f"starting from random weights (seed {config.train.seed})"
    )
    return Start(trainer, state, 0, tokenizer)


def _prepare(config: Config, log: Callable[[str], None]) -> tuple[Trainer, Tokenizer, Restored | None]:
    origin: Restored | None = None
    if config.train.init_from:
        origin = checkpoint.open_run(config.train.init_from, log=log)
        config = resolve_model(config, origin.config)
    elif config.train.lora_rank:
        raise UserError(
            f"train.lora_rank: found {config.train.lora_rank} without train.init_from; expected a checkpoint that the "
            "factors adapt, or 0"
        )
    elif config.model is None:
        raise UserError("model: found none; expected `model=T5Config(...)` in the config or train.init_from=CHECKPOINT")
    tokenizer = _find_tokenizer(config, origin)
    assert config.model is not None
    if tokenizer.size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size: found {config.model.vocab_size}; expected at least {tokenizer.size}, "
            "the size of the tokenizer"
        )
    if config.train.objective == "sequential":
        _check_separator(config.data.separator, tokenizer)
    return Trainer(config), tokenizer, origin


def _find_tokenizer(config: Config, origin: Restored | None) -> Tokenizer:
    if config.data.tokenizer:
        return Tokenizer.load(config.data.tokenizer)
    if own := make_task(config.data).tokenizer():
        return own
    if origin and (carried := origin.tokenizer_files()):
        return Tokenizer.load(carried)
    raise UserError(
        "data.tokenizer: found none; expected a directory of tokenizer files"
        + (f" ({config.train.init_from} carries none)" if config.train.init_from else "")
    )


def _check_separator(separator: str, tokenizer: Tokenizer) -> None:
    """A sequential target can be taken apart again only if the tokenizer knows what parts its rows."""
    if (
        separator.strip(" ")
        and len(split_rows(tokenizer.decode(tokenizer.encode(f"the{separator}the")), separator)) != 2
    ):
        raise UserError(
            f"data.separator: found {separator!r}, which the tokenizer does not give back; expected text that it does, "
            "such as ' ; ', or spaces where rows need not be told apart"
        )


class Stop:
    """SIGTERM and SIGINT ask for a checkpoint at the next step boundary; a second one ends the process at once.

    A signal to any one of several processes stops all of them, at the same step. Only a main thread gets signals.
    """

    def __init__(self) -> None:
        """Installs the handlers."""
        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        self.signal: int | None = None  # that this process got
        self.agreed = 0  # that all know of
        self._vote = distributed.Vote()
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.restore()
            signal.raise_signal(number)
        self.signal = number

    def asked(self) -> bool:
        """Whether to stop here. All processes must call it alike: at each step, and in evaluations at each batch."""
        self.agreed = self.agreed or self._vote(self.signal or 0)
        return self.agreed > 0

    def restore(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def fit(config: Config, workdir: str | Path, *, profile: int = 0, log: Callable[[str], None] = print) -> int:
    """Trains until `train.steps`, from wherever the run in `workdir` stands.

    Args:
      config: the experiment.
      workdir: the run's directory.
      profile: traces that many steps, from the third of this call on, into WORKDIR/profile.
      log: called with each line worth saying.

    Returns:
      0; 1 if the last checkpoint could not be written; or 128 + the signal that stopped it, between two steps or in an
      evaluation, after a checkpoint.

    Raises:
      UserError: the config, the data, the starting checkpoint or the directory cannot be used.
    """
    if config.train.objective == "none":
        raise UserError("train.objective: found 'none'; expected pipelined or sequential")
    environment.check()
    decoding.check(config.train.objective, config.decode)  # what evaluations will ask for
    if not distributed.first():
        log = _silence
    with distributed.together(UserError):
        task = make_task(config.data)
        train, dev = task.examples("train"), task.examples("dev")
        if len(dev):
            require(config.data.metric or task.metric)
        if not len(train):
            raise UserError("data.train: found nothing; expected the examples to train on")
        data, most = fingerprint(train), config.train.evaluate_examples
        dev_data = fingerprint(dev[:most] if most else dev)
    distributed.check_same(config_lib.to_json(config), "the config")
    distributed.check_same(data, "data.train")
    distributed.check_same(dev_data, "data.dev")
    stop = Stop()
    try:
        with RunDirectory(workdir, log) as directory:
            return _fit(config, directory, train, dev, data, stop, log, profile)
    finally:
        stop.restore()


def _silence(line: str) -> None:
    pass


def _fit(
    config: Config,
    directory: RunDirectory,
    train: Any,
    dev: Any,
    data: str,
    stop: Stop,
    log: Callable[[str], None],
    profile: int,
) -> int:
    clock, keep, keep_every = Clock(), config.train.keep_checkpoints, config.train.keep_every
    store = Store(directory.path / "checkpoints", keep=keep, keep_every=keep_every, writable=True, log=log)
    start = begin(config, directory, store, data, log)
    trainer, state, config = start.trainer, start.state, start.trainer.config
    if start.step:
        store.retire(start.step)
    owed = len(dev) > 0 and any(owes(directory, start.step, c) for c in (config, start.before) if c)
    if start.step >= config.train.steps and not owed:
        store.close()
        directory.finish(_last_line("end", start.step, state, {}))
        log(f"already trained for {start.step} of {config.train.steps} steps; nothing to do")
        return 0
    directory.begin(config, start.tokenizer, start.step, log)
    boards = Boards(config.train, directory.path, start.step, log)

    def write(values: dict[str, Any]) -> None:
        directory.log_metrics(values)
        boards.write(values)

    assert config.model is not None
    with clock("data"):
        shapes = start.shapes or _same_shapes(choose_shapes(train, start.tokenizer, config, config.model))
    examiner = Examiner(config, trainer.dev_loss, shapes, dev, start.tokenizer, directory, log, write)
    exchange = distributed.Exchange()
    rows = sharding.own_rows(trainer.mesh, config.train.batch_size // pack_size(config.train))
    part = Part(jax.process_index(), jax.process_count(), rows, exchange)
    batches = prefetch(TrainingBatches(train, start.tokenizer, config, config.model, shapes, part), start.step)
    size, own = (sum(x.size for x in jax.tree.leaves(t)) / 1e6 for t in (state.params, trainer.trained(state.params)))
    trains = f" ({own:.2f} M are trained)" if own < size else ""
    if start.step == 0 and config.train.warmup_steps >= config.train.steps:
        log(
            f"warning: train.warmup_steps = {config.train.warmup_steps}: found no fewer than train.steps = "
            f"{config.train.steps}; the full learning rate comes last or never"
        )
    where = f"{trainer.mesh.size} x {jax.devices()[0].device_kind}"
    log(f"{size:.1f} M parameters{trains}, {len(train)} training examples, {trainer.model.dtype} on {where}")
    most = len(shapes.in_use(config.train.steps))
    log(f"batches are padded to {most} shapes; each one compiles once, the first {len(shapes.in_use(0))} at the start")
    progress = Progress("training", config.train.steps, unit="step", start=start.step, shown=distributed.first())
    window = Window(config, len(train), write, progress, list(trainer.mesh.devices.flat), clock)
    trace = Trace(directory.path / "profile", first=start.step + 3, steps=profile)
    step, saved, steps = start.step, start.step, config.train.steps
    metadata = {"data": data, "shapes": shapes.to_json()}
    examined = True
    try:
        if owed:
            with clock("evaluation"), progress.aside("evaluating"):
                examined = examiner.evaluate(step, state.params, progress, stop.asked)
        while step < steps and not stop.asked() and not examiner.lost_patience:
            window.settle()
            with clock("data"):
                batch = next(batches)
                arrays = sharding.put_batch(batch.arrays, trainer.mesh)
            program = _program(trainer, batch, clock, progress)
            if not distributed.several():  # else all would have to compile in the same order
                trainer.prepare(shapes.in_use(min(step + EVERY, steps - 1)))
            trace.before(step + 1)
            state, metrics = program(state, arrays, trainer.dropout_key(step + 1))
            step += 1
            if step == saved + 1:  # the save went on beside this one step: a crash never costs more than one interval
                jax.block_until_ready(metrics)
                with clock("checkpoint"):
                    store.settle()
            trace.after(step, metrics)
            window.add(step, batch, metrics)
            last, note = step == steps, ""
            evaluates = len(dev) > 0 and evaluated(step, config)
            saves = step % config.train.checkpoint_every == 0 and not last
            if evaluates or saves:
                jax.block_until_ready(metrics)  # what is waited for here is the step's time
            # The log before the checkpoint: whoever goes on from that does not write this line again.
            if last or step % config.train.log_every == 0:
                with distributed.together(UserError):
                    values = window.flush()
                loss = f"loss {values['loss']:.4f}" if values["loss"] is not None else "no finite loss"
                note = f"{loss}, epoch {values['epoch']:.1f}"
            # The evaluation, too: whoever is killed in it repeats it. One that is stopped is made up for on resume.
            if evaluates:
                with clock("evaluation"), progress.aside("evaluating"):
                    examined = examiner.evaluate(step, state.params, progress, stop.asked)
            if saves:
                with clock("checkpoint"):
                    saved = step if _save(store, step, state, config, metadata) else saved
            progress.add(1, note)
        if window.steps:
            with distributed.together(UserError):
                window.flush()
    except BaseException as error:
        if not distributed.several() or distributed.shared(error):  # else the others do not come to the end of the save
            store.settle()
        if not distributed.lost(error):  # else whom we would tell is gone
            exchange.close()
        progress.close()
        trace.close()
        trainer.close()
        boards.close()
        raise
    exchange.close()
    trace.close()
    trainer.close()
    with clock("checkpoint"):
        done = store.settle()
        if saved < step or not done:
            done = _save(store, step, state, config, metadata, wait=True)
        store.close()
        best = examiner.best is None or examiner.best.close()
    clock.lap()
    ended = (step >= steps or examiner.lost_patience) and examined
    write(_last_line("end" if ended else "stopped", step, state, clock.totals))
    boards.close()
    progress.close()
    if not done:
        log(f"error: step {step} is not on disk; the same command goes on from the checkpoint before")
        return 1
    if not best:
        log("error: the best step so far is not in best/; it was not on disk before the run ended")
        return 1
    log("time: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.totals.items()))
    if stop.agreed and not ended:
        log(f"stopped by {signal.Signals(stop.agreed).name} at step {step}; the same command goes on from there")
        return 128 + stop.agreed
    if step < steps:
        log(f"no better evaluation in train.patience = {config.train.patience}: training ends before train.steps")
    reached = f" ({progress.note})" if progress.note else ""
    log(f"trained for {step} steps{reached}; checkpoints in {directory.path / 'checkpoints'}")
    return 0


def _same_shapes(chosen: Shapes) -> Shapes:
    """Process 0's: the choice compares sums of floats, which another kind of CPU rounds otherwise."""
    return Shapes.from_json(distributed.same(chosen.to_json()))


def _program(trainer: Trainer, batch: Batch, clock: Clock, progress: Progress) -> Any:
    """The step for a batch of that shape; says so while it compiles."""
    shapes = {name: x.shape for name, x in batch.arrays.items()}
    if trainer.is_ready(shapes):
        return trainer.program(shapes)
    what = f"compiling for sources of {shapes['source'][1]} tokens, {shapes['inputs'][1]} slots in a row"
    with clock("compile"), progress.aside(what):
        return trainer.program(shapes)


def evaluated(step: int, config: Config) -> bool:
    """Whether the dev split is decoded after this step."""
    return step % config.train.evaluate_every == 0 or step == config.train.steps


def owes(directory: RunDirectory, step: int, config: Config) -> bool:
    """Whether the log lacks the evaluation after this step, as of a run that was stopped in it."""
    return step > 0 and evaluated(step, config) and not directory.has("evaluation", step)


def _save(
    store: Store, step: int, state: TrainState, config: Config, metadata: dict[str, Any], *, wait: bool = False
) -> bool:
    items = {"params": state.params, "state": state.optimizer}
    return store.save(step, items, config=config, metadata=metadata, wait=wait)


def _last_line(event: str, step: int, state: TrainState, seconds: dict[str, float]) -> dict[str, Any]:
    params_fp = digest(fingerprints(state.params))
    return {"event": event, "step": step, "seconds": dict(seconds), "params_fp": params_fp}
