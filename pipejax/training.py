"""Fine-tuning and training from scratch, with the pipelined or the sequential objective. Read it top to bottom.

Shapes: B batch, L source length, N target slots.
"""

import dataclasses
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipejax import checkpoint, grid, losses, processes, sharding
from pipejax.checkpoint import Restored, Store
from pipejax.config import Config, T5Config, TrainConfig
from pipejax.data import make_task
from pipejax.data.core import TrainingBatches, prefetch
from pipejax.errors import UserError
from pipejax.generate import compute_dtype, split_rows
from pipejax.monitoring import Examiner, Window
from pipejax.progress import Progress
from pipejax.run_directory import RunDirectory, check_resume, resolve_model
from pipejax.t5 import T5, VECTORS, init_params
from pipejax.tokenizer import Tokenizer

Array = jax.Array
Batch = dict[str, Array]


@flax.struct.dataclass
class TrainState:
    """All that training changes. RNG and data position follow from seed and step."""

    params: Any
    optimizer: optax.OptState


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up to `learning_rate`, then constant, or linear down to 0 at `steps`."""
    warmup = max(config.warmup_steps, 1)
    after = optax.constant_schedule(config.learning_rate)
    if config.schedule == "linear":
        after = optax.linear_schedule(config.learning_rate, 0.0, max(config.steps - warmup, 1))
    # Step 1 is count 0: it already learns, and step `warmup` is the first at the full rate.
    first = config.learning_rate / warmup
    return optax.join_schedules([optax.linear_schedule(first, config.learning_rate, warmup - 1), after], [warmup])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW after clipping by global norm; norms and relative biases do not decay."""

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda keys, _: not sharding.path_of(keys).endswith(VECTORS), params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config),
            config.beta1,
            config.beta2,
            config.epsilon,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


def batch_loss(model: T5, params: Any, batch: Batch, dropout: Array | None) -> tuple[Array, Array]:
    """Summed loss and target tokens of a batch of flat slots (paper section 3.3); without a key no dropout."""
    source_mask = jnp.arange(batch["source"].shape[1]) < batch["source_length"][:, None]
    real = jnp.arange(batch["inputs"].shape[1]) < batch["slots"][:, None]
    row, time_ = batch["row"], batch["time"]
    pairs = row[:, :, None], time_[:, :, None], row[:, None, :], time_[:, None, :]  # queries against keys
    mask = grid.visible(*pairs) & real[:, None, :]
    rngs = None if dropout is None else {"dropout": dropout}
    logits: Any = model.apply(
        {"params": params},
        batch["source"],
        source_mask,
        batch["inputs"],
        mask,
        grid.distance(*pairs),
        deterministic=dropout is None,
        rngs=rngs,
    )
    return losses.cross_entropy(logits, batch["targets"], batch["weights"])


def train_step(
    model: T5, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch, key: Array
) -> tuple[TrainState, dict[str, Array]]:
    """One update with the mean loss over the real target tokens of the global batch."""

    def mean_loss(params: Any) -> tuple[Array, Array]:
        total, count = batch_loss(model, params, batch, key)
        return total / jnp.maximum(count, 1), count

    (loss, count), gradient = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
    metrics = {"loss": loss, "tokens": count, "grad_norm": optax.tree.norm(gradient)}
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state), metrics


class Trainer:
    """The compiled step, the shardings, and the state's birth, for one resolved config on one mesh."""

    def __init__(self, config: Config) -> None:
        """Compiles nothing yet; checks that the batch divides over the mesh."""
        assert config.model is not None
        self.config, self.mesh = config, sharding.make_mesh(config.mesh)
        sharding.check_batch(config.train.batch_size, self.mesh, key="train.batch_size")
        dtype = compute_dtype(config.train.dtype)
        self.model = T5(config.model, dtype=dtype, dropout=config.train.dropout)
        self.optimizer = make_optimizer(config.train)
        self.key = jax.random.key(config.train.seed)
        self.abstract = jax.eval_shape(partial(self._birth, config.model), self.key)
        self.shardings = self._shardings()
        replicated = sharding.replicated(self.mesh)
        self.step: Callable[..., tuple[TrainState, dict[str, Array]]] = jax.jit(
            partial(train_step, self.model, self.optimizer),
            donate_argnums=0,
            in_shardings=(self.shardings, None, replicated),
            out_shardings=(self.shardings, replicated),
        )
        self._loss = jax.jit(partial(batch_loss, T5(config.model, dtype=dtype), dropout=None))

    def _birth(self, model: T5Config, key: Array) -> TrainState:
        params = init_params(model, jax.random.fold_in(key, 0))
        return TrainState(params, self.optimizer.init(params))

    def _shardings(self) -> TrainState:
        params = sharding.param_shardings(self.abstract.params, self.mesh)
        replicated = sharding.replicated(self.mesh)
        optimizer = optax.tree.map_params(
            self.optimizer,
            lambda _, own: own,
            self.abstract.optimizer,
            params,
            transform_non_params=lambda _: replicated,
        )
        return TrainState(params, optimizer)

    def fresh(self, params: Any | None = None) -> TrainState:
        """A state from the seed, or from given parameters."""
        if params is None:
            assert self.config.model is not None
            birth = partial(self._birth, self.config.model)
            return jax.jit(birth, out_shardings=self.shardings)(self.key)
        params = sharding.put_tree(params, self.shardings.params)
        optimizer = jax.jit(self.optimizer.init, out_shardings=self.shardings.optimizer)(params)
        return TrainState(params, optimizer)

    def templates(self) -> dict[str, Any]:
        """What `checkpoint.Store.restore` needs to put a saved state on this mesh."""
        placed = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.abstract, self.shardings
        )
        return {"params": placed.params, "state": placed.optimizer}

    def dev_loss(self, params: Any, arrays: dict[str, np.ndarray]) -> tuple[Array, Array]:
        """Summed loss and token count of a host batch, without dropout."""
        return self._loss(params, sharding.put_batch(arrays, self.mesh))

    def dropout_key(self, step: int) -> Array:
        """The key of a step (1-based)."""
        return jax.random.fold_in(self.key, step)


@dataclasses.dataclass
class Start:
    """Where a run begins."""

    trainer: Trainer
    state: TrainState
    step: int  # updates already made
    tokenizer: Tokenizer


def begin(config: Config, directory: RunDirectory, store: Store, log: Callable[[str], None]) -> Start:
    """Order: the run's own newest good checkpoint, then `train.init_from`, then random weights; says which."""
    trainer: Trainer | None = None

    def expect(saved: Config) -> dict[str, Any]:
        nonlocal trainer
        wanted = config if config.model is not None else dataclasses.replace(config, model=saved.model)
        check_resume(saved, wanted, directory.path)
        if saved.train.steps != wanted.train.steps and wanted.train.schedule == "linear":
            log(f"train.steps: {saved.train.steps} -> {wanted.train.steps}; the linear schedule now ends there")
        trainer = trainer or Trainer(wanted)
        return trainer.templates()

    had_steps = bool(processes.same(store.steps()))
    own = store.newest(expect, log=log, set_aside=True)
    if had_steps and own is None:
        log(f"{store.directory}: found no good step; training starts again from its beginning")
    if own is not None and trainer is not None:
        log(f"resuming at step {own.step} ({own.path})")
        state = TrainState(own.items["params"], own.items["state"])
        with processes.together(UserError):
            tokenizer = Tokenizer.load(directory.path / "tokenizer")
        return Start(trainer, state, own.step, tokenizer)
    with processes.together(UserError):
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
    elif config.model is None:
        raise UserError("model: found none; expected `model=T5Config(...)` in the config or train.init_from=CHECKPOINT")
    tokenizer = _find_tokenizer(config)
    assert config.model is not None
    if tokenizer.size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size: found {config.model.vocab_size}; expected at least {tokenizer.size}, "
            "the size of the tokenizer"
        )
    if config.train.objective == "sequential":
        _check_separator(config.data.separator, tokenizer)
    return Trainer(config), tokenizer, origin


def _find_tokenizer(config: Config) -> Tokenizer:
    if config.data.tokenizer:
        return Tokenizer.load(config.data.tokenizer)
    if own := make_task(config.data).tokenizer():
        return own
    carried = Path(config.train.init_from) / "tokenizer"
    if config.train.init_from and carried.is_dir():
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

    A signal to any one of several processes stops all of them, at the same step.
    """

    def __init__(self) -> None:
        """Installs the handlers."""
        self.signal: int | None = None  # that this process got
        self.agreed = 0  # that all know of
        self._vote = processes.Vote()
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.restore()
            signal.raise_signal(number)
        self.signal = number

    def asked(self) -> bool:
        """Whether training is to stop here; to be called once a step."""
        self.agreed = self.agreed or self._vote(self.signal or 0)
        return self.agreed > 0

    def restore(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def fit(config: Config, workdir: str | Path, *, log: Callable[[str], None] = print) -> int:
    """Trains until `train.steps`, from wherever the run in `workdir` stands.

    Returns:
      0; 1 if the last checkpoint could not be written; or 128 + the signal that stopped it at a step boundary, after a
      checkpoint.

    Raises:
      UserError: the config, the data, the starting checkpoint or the directory cannot be used.
    """
    if config.train.objective == "none":
        raise UserError("train.objective: found 'none'; expected pipelined or sequential")
    if not processes.first():
        log = _silence
    with processes.together(UserError):
        task = make_task(config.data)
        train, dev = task.examples("train"), task.examples("dev")
        if not len(train):
            raise UserError("data.train: found nothing; expected the examples to train on")
    stop = Stop()
    try:
        with RunDirectory(workdir, log) as directory:
            return _fit(config, directory, train, dev, stop, log)
    finally:
        stop.restore()


def _silence(line: str) -> None:
    pass


def _fit(config: Config, directory: RunDirectory, train: Any, dev: Any, stop: Stop, log: Callable[[str], None]) -> int:
    keep, keep_every = config.train.keep_checkpoints, config.train.keep_every
    store = Store(directory.path / "checkpoints", keep=keep, keep_every=keep_every, writable=True, log=log)
    start = begin(config, directory, store, log)
    trainer, state, config = start.trainer, start.state, start.trainer.config
    if start.step >= config.train.steps:
        store.close()
        log(f"already trained for {start.step} of {config.train.steps} steps; nothing to do")
        return 0
    directory.begin(config, start.tokenizer, start.step)
    examiner = Examiner(config, trainer.dev_loss, dev, start.tokenizer, directory, log)
    assert config.model is not None
    batches = prefetch(TrainingBatches(train, start.tokenizer, config, config.model), start.step)
    size = sum(x.size for x in jax.tree.leaves(state.params)) / 1e6
    where = f"{trainer.mesh.size} x {jax.devices()[0].device_kind}"
    log(f"{size:.1f} M parameters, {len(train)} training examples, {trainer.model.dtype} on {where}")
    log("the first steps are slow: each new length compiles once")
    progress = Progress("training", config.train.steps, unit="step", start=start.step, shown=processes.first())
    window = Window(directory, progress, learning_rate(config.train), config.train.batch_size)
    step, saved, steps = start.step, start.step, config.train.steps
    while step < steps and not stop.asked():
        batch = next(batches)
        arrays = sharding.put_batch(batch.arrays, trainer.mesh)
        state, metrics = trainer.step(state, arrays, trainer.dropout_key(step + 1))
        step += 1
        last = step == steps
        flush = last or step % config.train.log_every == 0
        window.add(step, metrics, batch.cut_sources, batch.cut_targets, flush=flush)
        begun = time.perf_counter()
        # Evaluation first: whoever is killed in between repeats both, and no evaluation is ever left out.
        if len(dev) and (step % config.train.evaluate_every == 0 or last):
            examiner.evaluate(step, state.params, progress)
        if not last and step % config.train.checkpoint_every == 0:
            _save(store, step, state, config)
            saved = step
        window.pause(time.perf_counter() - begun)
    if window.steps:
        window.flush(step)
    done = store.settle()
    if saved < step or not done:
        done = _save(store, step, state, config, wait=True)
    store.close()
    examiner.store.close()
    progress.close()
    if not done:
        log(f"error: step {step} is not on disk; the same command goes on from the checkpoint before")
        return 1
    if stop.agreed and step < steps:
        log(f"stopped by {signal.Signals(stop.agreed).name} at step {step}; the same command goes on from there")
        return 128 + stop.agreed
    log(f"trained for {step} steps; checkpoints in {directory.path / 'checkpoints'}")
    return 0


def _save(store: Store, step: int, state: TrainState, config: Config, *, wait: bool = False) -> bool:
    return store.save(step, {"params": state.params, "state": state.optimizer}, config=config, wait=wait)
