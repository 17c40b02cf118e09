"""The dry run of a training: checks the config, the data, the memory, the first batch and one step; leaves no files."""

import contextlib
import dataclasses
import itertools
import logging
import tempfile
import time
from pathlib import Path

import numpy as np

from pipejax import methods
from pipejax.checkpoint import Store
from pipejax.config import Config
from pipejax.data.batches import Batch
from pipejax.data.encoding import answered
from pipejax.data.tokenizer import Tokenizer
from pipejax.system import environment
from pipejax.training.loop import Examples, Run, require_method
from pipejax.training.memory import GIB, estimator
from pipejax.training.run_directory import RunDirectory
from pipejax.training.start import as_begun, start_run
from pipejax.training.stop import Stop

logger = logging.getLogger(__name__)
SHOWN = 80  # characters of a text that the log shows


def dry_run(config: Config, workdir: str | Path) -> int:
    """Makes the first step of a new run with this config in a temporary directory, and logs the results.

    Returns:
      0; 1 if the loss or the gradient of the step is not finite.

    Raises:
      UserError: for the same reasons as `pipejax.training.loop.fit`; also if `workdir` holds a run that cannot continue
        with this config.
    """
    require_method(config)
    methods.check_training(config)
    environment.check_environment()
    examples = Examples.of(config)
    _check_workdir(config, RunDirectory(workdir))
    quiet = dataclasses.replace(config.train, tensorboard=False, wandb="", mlflow="")
    config = dataclasses.replace(config, train=quiet)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(contextlib.closing(Stop()))
        directory = stack.enter_context(RunDirectory(stack.enter_context(tempfile.TemporaryDirectory())))
        store = stack.enter_context(contextlib.closing(Store(directory.path / "checkpoints", writable=True)))
        start = start_run(config, directory, store, examples.fingerprints)
        ends = start.trainer.model.config.end_token_ids
        trained = answered(examples.train, start.tokenizer, config.data.empty_targets, ends)
        examples = dataclasses.replace(examples, train=trained)
        run = stack.enter_context(Run(start, examples, directory, store, stop, profile=0))
        memory = sum(estimator(run.trainer)(run.trainer.config).values()) / GIB
        logger.info(f"memory: {memory:.2f} GiB on each device, estimated (pipejax plan has the terms)")
        first = next(run.batches)
        logger.info(_describe(first, start.tokenizer))
        run.batches = itertools.chain([first], run.batches)
        begun = time.perf_counter()
        run.make_step()
        values = {name: float(x) for name, x in run.window.steps[-1][2].items()}
        seconds = time.perf_counter() - begun
    found = f"loss {values['loss']:.4f}, gradient norm {values['grad_norm']:.3g}"
    logger.info(f"step 1: {found}, {seconds:.1f} s with compilation")
    if not values["good"]:
        logger.error("the loss or the gradient of the first step is not finite")
        return 1
    logger.info(f"the dry run ends here; {workdir} is unchanged")
    return 0


def _check_workdir(config: Config, directory: RunDirectory) -> None:
    """Raises a UserError if the directory holds a run that cannot continue with this config."""
    store = Store(directory.path / "checkpoints")
    if steps := store.steps():
        as_begun(config, store.describe(max(steps)).config, directory.path)
        logger.info(
            f"{directory.path}: the run at step {max(steps)} would be continued; the dry run starts a new one elsewhere"
        )


def _describe(batch: Batch, tokenizer: Tokenizer) -> str:
    """Returns one line for the log: the shapes of a batch, and its first example as text."""
    sizes = {name: x.shape for name, x in batch.arrays.items()}
    real = int(np.count_nonzero(batch.arrays["weights"]))
    source = tokenizer.decode(batch.arrays["source"][0, : batch.arrays["source_length"][0]])
    own = batch.arrays["example"][0] == 0
    own &= np.arange(len(own)) < batch.arrays["slots"][0]
    target = tokenizer.decode(batch.arrays["inputs"][0][own])
    return (
        f"first batch: sources {sizes['source']}, targets {sizes['inputs']}, {real} target tokens; "
        f"its first example, {batch.ids[0]}: {source[:SHOWN]!r} -> {target[:SHOWN]!r}"
    )
