"""One training step, compiled and sharded: loss, gradient and update. The module reads no files and has no loop.

Shapes: B batch, L source length, G sequences (packed targets), N slots of a sequence, A parts of a batch
(`train.accumulate`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from pipejax import grid, methods
from pipejax.config import Config
from pipejax.data.batches import abstract_batch, pack_size
from pipejax.data.shapes import Pair
from pipejax.decoding import group_of
from pipejax.methods import losses
from pipejax.methods.losses import Loss
from pipejax.model import auxiliary, lora, sharding
from pipejax.model.auxiliary import Auxiliary, Outputs
from pipejax.model.backbone import Module, choose_blocks, with_encoder_outputs
from pipejax.model.dropout import STREAM, numbered
from pipejax.model.parameters import check_paths, check_read, initial
from pipejax.model.precision import compute_dtype, precision
from pipejax.model.slots import Slots
from pipejax.model.t5 import is_unpatched
from pipejax.system import Tree, cli
from pipejax.system.compiled import CompiledPrograms
from pipejax.system.errors import UserError
from pipejax.system.extras import extra
from pipejax.training.optimizer import combine, learning_rate, make_optimizer, partition, trained_paths, updates_made

with extra("train", "training"):
    import optax

Array = jax.Array
Arrays = dict[str, Array]  # the arrays of a batch, by name
ArrayShapes = Mapping[str, tuple[int, ...]]  # the shapes of a batch's arrays, by name
Position = Callable[[Array, Array], Array]
Group = Callable[[Array], Array]
# Without it, XLA merges the products of queries, keys and values into one, and copies its results apart again.
GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": "0"}
SOURCES = ("source", "source_length", "number")  # arrays of a batch with one row per example; the others have G rows


@flax.struct.dataclass
class TrainState:
    """The state that training changes. Random numbers and the data position follow from the seed and the step."""

    params: Tree
    optimizer: optax.OptState


def items_of(state: TrainState) -> dict[str, Tree]:
    """Returns the items of a checkpoint: "params", "state" of the optimizer, and "auxiliary" if there are some."""
    params, own = auxiliary.split(state.params)
    return {"params": params, "state": state.optimizer} | ({} if own is None else {auxiliary.ITEM: own})


def state_of(items: Mapping[str, Tree]) -> TrainState:
    """Returns the state of the items of a checkpoint; see `items_of`."""
    return TrainState(auxiliary.join(items["params"], items.get(auxiliary.ITEM)), items["state"])


def batch_loss(
    model: Module,
    params: Tree,
    batch: Arrays,
    dropout: Array | None,
    loss: Loss = losses.cross_entropy,
    position: Position = grid.position,
    part: Array | None = None,
    *,
    most_logits: int | None = None,
    beside: Auxiliary | None = None,
    group: Group | None = None,
) -> tuple[Array, Array]:
    """Returns the summed loss and the number of target tokens of a batch of flat slots (paper section 3.3).

    Args:
      model: the module.
      params: its parameters.
      batch: i32 "source" [B, L], "source_length" [B], "inputs", "row", "time" and "example" [G, N], "slots" [G];
        "targets" and f32 "weights" as the loss takes them.
      dropout: the key of the step; None: no dropout.
      loss: the loss of the method.
      position: the function that returns the decoder's positions from rows and times.
      part: the index of this part of a batch; None: the batch is whole.
      most_logits: the most logits computed at once, see `losses.in_parts`.
      beside: auxiliary parameters, in `params`; the result is then their loss and its divisor. None: there are none.
      group: the function that returns the groups of rows, see `grid.shares_group`; None: all rows are in group 0.
    """
    source, example = batch["source"], batch["example"]
    source_mask = jnp.arange(source.shape[1]) < batch["source_length"][:, None]
    real = jnp.arange(example.shape[1]) < batch["slots"][:, None]
    row, time_ = batch["row"], batch["time"]
    groups = None if group is None else group(row)
    if getattr(model, "blocks", None):
        mask, of_source = Slots(jnp.where(real, example, -1), row, time_, position(row, time_), groups), None
    else:
        pairs = row[:, :, None], time_[:, :, None], row[:, None, :], time_[:, None, :]  # queries against keys
        together = example[:, :, None] == example[:, None, :]
        mask = grid.visible(*pairs) & together & real[:, None, :]
        if groups is not None:
            mask &= grid.shares_group(groups[:, :, None], groups[:, None, :])
        # The number of each source token's example within its sequence.
        owner = jnp.repeat(jnp.arange(source.shape[0] // example.shape[0]), source.shape[1])
        of_source = example[:, :, None] == owner
    params, own = auxiliary.split(params)
    variables = {"params": params}
    rngs = None
    if dropout is not None:
        rngs = {"dropout": dropout if part is None else jax.random.fold_in(dropout, part), STREAM: dropout}
    numbers = batch.get("number", jnp.arange(source.shape[0]))
    given = source, source_mask, batch["inputs"], mask, position(row, time_), of_source
    hidden: Array
    if beside is not None:
        hidden, encoded = with_encoder_outputs(model.apply, variables, *given, method="hidden")
        total, divisor = beside.loss(own, Outputs(encoded, hidden, batch))
        return jnp.asarray(total, jnp.float32), jnp.asarray(divisor, jnp.float32)
    with numbered(numbers, source.shape[1], example):
        hidden = model.apply(variables, *given, deterministic=dropout is None, rngs=rngs, method="hidden")

    def logits(hidden: Array) -> Array:
        answer: Array = model.apply(variables, hidden, method="logits")
        return answer

    words = model.config.vocab_size
    return losses.in_parts(loss, logits, hidden, batch["targets"], batch["weights"], vocabulary=words, most=most_logits)


def split_into_parts(batch: Arrays, parts: int) -> Arrays:
    """Splits a batch into `parts`: arrays [B, ...] become [A, B / A, ...], and [G, ...] become [A, G / A, ...].

    Part i has the sequences i, i + A, i + 2 A, ... with their sources. With this stride every device already holds its
    share of every part, so no data moves between devices.
    """
    groups = batch["inputs"].shape[0]

    def apart(name: str, x: Array) -> Array:
        pack = x.shape[0] // groups if name in SOURCES else 1
        rows = x.reshape(groups // parts, parts, pack, *x.shape[1:]).swapaxes(0, 1)
        return rows.reshape(parts, -1, *x.shape[1:])

    return {name: apart(name, x) for name, x in batch.items()}


def train_step(
    model: Module,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Arrays,
    key: Array,
    *,
    loss: Loss = losses.cross_entropy,
    position: Position = grid.position,
    accumulate: int = 1,
    clip_norm: float = 1.0,
    is_trained: Callable[[str], bool] = lambda path: True,
    place: Callable[[Tree], Tree] = lambda params: params,
    rate: optax.Schedule = lambda count: 0.0,
    branch: bool = True,
    most_logits: int | None = None,
    beside: Auxiliary | None = None,
    group: Group | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Makes one update with the mean loss over the real target tokens of the global batch.

    The batch is computed in `accumulate` parts. The sums of the losses and of their gradients are added over the parts
    and divided once, by the number of tokens in all parts, so the result is the same as for the whole batch even if the
    parts have different numbers of tokens. If the loss or the gradient is not finite, the state does not change.

    With `branch`, the update is skipped by a branch (`lax.cond`); without it, by selecting the old or the new value in
    each array. On a CPU, XLA updates the donated buffers in place only inside a branch. On a GPU a branch waits for the
    host, whereas the selection is fused with the update.

    Args:
      model: the module.
      optimizer: the transformation of the trained parameters' gradients.
      state: the parameters and the optimizer's state.
      batch: the arrays of a batch; see `batch_loss`.
      key: the dropout key of the step.
      loss: the loss of the method.
      position: the function that returns the decoder's positions from rows and times.
      accumulate: the number of parts, A.
      clip_norm: the largest global norm of the gradient.
      is_trained: whether the parameter at a path is trained.
      place: the function that is applied to the parameters before the forward pass, to gather sharded tables.
      rate: the learning rate by update count, for the metrics only.
      branch: how an update that is not finite is skipped.
      most_logits: the most logits computed at once, see `losses.in_parts`.
      beside: the auxiliary parameters, which are trained by their own loss; None: there are none.
      group: the function that returns the groups of rows, as for `batch_loss`.

    Returns:
      The new state, and the scalars "loss", "tokens", "grad_norm", "good" and "learning_rate".
    """
    trained, fixed = partition(state.params, is_trained)
    compute = partial(batch_loss, model, most_logits=most_logits, beside=beside, group=group)

    def summed(trained: Tree, batch: Arrays, part: Array | None = None) -> tuple[Array, Array]:
        params, own = place(combine(trained, fixed)), key if model.dropout else None
        return compute(params, batch, own, loss, position, part)

    gradient_of = jax.value_and_grad(summed, has_aux=True)
    if accumulate == 1:
        (total, count), gradient = gradient_of(trained, batch)
    else:

        def add(sums: Tree, numbered: tuple[Array, Arrays]) -> tuple[Tree, None]:
            number, part = numbered
            own = gradient_of(trained, part, number)
            return jax.tree.map(jnp.add, sums, own), None

        zero = (jnp.float32(0), jnp.float32(0)), jax.tree.map(jnp.zeros_like, trained)
        parts = jnp.arange(accumulate), split_into_parts(batch, accumulate)
        ((total, count), gradient), _ = jax.lax.scan(add, zero, parts)
    divisor = jnp.maximum(count, 1)
    norm = optax.tree.norm(gradient) / divisor
    good = jnp.isfinite(total) & jnp.isfinite(norm)
    # One factor does both the mean and the clipping by global norm; a separate division would pass over all parameters
    # once more.
    factor = clip_norm / jnp.maximum(norm, clip_norm) / divisor

    def update(state: TrainState) -> TrainState:
        trained, fixed = partition(state.params, is_trained)
        scaled = jax.tree.map(lambda x: x * factor, gradient)
        updates, optimizer_state = optimizer.update(scaled, state.optimizer, trained)
        return TrainState(combine(optax.apply_updates(trained, updates), fixed), optimizer_state)

    if branch:
        new = jax.lax.cond(good, update, lambda state: state, state)
    else:
        new = jax.tree.map(lambda new, old: jnp.where(good, new, old), update(state), state)
    metrics = {"loss": total / divisor, "tokens": count, "grad_norm": norm, "good": good}
    return new, metrics | {"learning_rate": jnp.float32(rate(updates_made(state.optimizer)))}


class Trainer:
    """The compiled step, the shardings and the initial state, for one resolved config on one mesh."""

    def __init__(self, config: Config, devices: Sequence[jax.Device] | None = None) -> None:
        """Checks that the batch divides over the mesh; compiles nothing yet.

        Args:
          config: the resolved config; "auto" of `train.remat` counts as "none".
          devices: see `sharding.make_mesh`.

        Raises:
          UserError: the batch does not divide, or a parameter's path or shape does not fit the model.
        """
        if config.train.remat == "auto":  # `memory.choose_remat` was not called
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, remat="none"))
        assert config.model is not None
        self.config, self.mesh = config, sharding.make_mesh(**vars(config.mesh), devices=devices)
        train = config.train
        check_batch(config, self.mesh)
        dtype = compute_dtype(train.dtype)
        pin = partial(sharding.split_batch, mesh=self.mesh)
        make = partial(config.model.module, dtype=dtype, remat=train.remat, pin=pin)
        self.method = methods.trained(config)
        strategy = methods.strategy_of(self.method, methods.Ids.of(config.model))
        group = group_of(strategy)
        self.blocks = choose_blocks(config.model, self.mesh.devices.flat[0], sharding.batch_sharding(self.mesh))
        if self.blocks:  # only modules that support blocks have this argument
            make = partial(make, blocks=self.blocks)
        self.model = make(dropout=train.dropout, shards=sharding.batch_shards(self.mesh))
        self.optimizer = make_optimizer(train)
        self._is_trained = trained_paths(train)
        self.key = jax.random.key(train.seed)
        self.abstract = jax.eval_shape(lambda key: self._initial_state(self.model.config.init_params(key)), self.key)
        whole, _ = auxiliary.split(self.abstract.params)
        check_paths("model", {path: x.shape for path, x in flatten_dict(whole, sep="/").items()}, config.model)
        if train.lora_rank and not is_unpatched(self.model):  # the layers of other modules may not read the factors
            check_read("train.lora_rank", self.model, self.abstract.params, (f"/{lora.A}", f"/{lora.B}"))
        self.shardings = self._shardings()
        replicated = sharding.replicated(self.mesh)
        place = partial(sharding.gather_tables, config.model, mesh=self.mesh)
        platform = self.mesh.devices.flat[0].platform
        loss, position = self.method.loss, strategy.position
        step = partial(
            train_step,
            self.model,
            self.optimizer,
            loss=loss,
            position=position,
            rate=learning_rate(train),
            clip_norm=train.clip_norm,
            accumulate=train.accumulate,
            is_trained=self._is_trained,
            place=place,
            branch=platform == "cpu",
            most_logits=losses.most_logits(platform),
            beside=config.auxiliary,
            group=group,
        )
        self._step = jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(self.shardings, None, replicated),
            out_shardings=(self.shardings, replicated),
        )
        self._programs = CompiledPrograms()
        self._prepared = set[Pair]()  # the pairs whose programs the background thread has compiled or will
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compiler")
        undropped = make()  # without dropout
        self._loss = jax.jit(
            lambda params, batch: batch_loss(
                undropped, place(params), batch, None, loss, position, beside=config.auxiliary, group=group
            )
        )

    def _initial_state(self, params: Tree) -> TrainState:
        """Returns the initial state of parameters: adds factors or auxiliary parameters, initialises the optimizer."""
        # 0 is no step's number; the initial weights are drawn with it
        key = jax.random.fold_in(jax.random.fold_in(self.key, 0), 1)
        params = lora.add(params, self.config.train.lora_rank, key, self._is_trained)
        if self.config.auxiliary is not None:
            params = auxiliary.join(params, self.config.auxiliary.init_params(key, self.config.model))
        return TrainState(params, self.optimizer.init(self.trained(params)))

    def trained(self, params: Tree) -> Tree:
        """Returns the subtree of the trained parameters."""
        return partition(params, self._is_trained)[0]

    def _shardings(self) -> TrainState:
        """Returns the shardings of the state; moments are sharded as their parameters."""
        whole, own = auxiliary.split(self.abstract.params)
        params = sharding.param_shardings(self.model.config, whole, self.mesh)
        if own is not None:
            params = auxiliary.join(params, sharding.param_shardings(self.config.auxiliary, own, self.mesh))
        replicated = sharding.replicated(self.mesh)
        optimizer = optax.tree.map_params(
            self.optimizer,
            # Adafactor keeps a row and a column for a matrix; these are replicated.
            lambda own, param, where: where if own.shape == param.shape else replicated,
            self.abstract.optimizer,
            self.trained(self.abstract.params),
            self.trained(params),
            transform_non_params=lambda _: replicated,
        )
        return TrainState(params, optimizer)

    def fresh(self, params: Tree | None = None) -> TrainState:
        """Returns a new state from the given parameters or, if None, from random ones drawn with the seed."""
        config = self.model.config
        if params is None:
            params = initial(config, jax.random.fold_in(self.key, 0), self.mesh)
        else:
            params = sharding.put_tree(params, sharding.param_shardings(config, params, self.mesh))
        return jax.jit(self._initial_state, donate_argnums=0, out_shardings=self.shardings)(params)

    def templates(self) -> dict[str, Tree]:
        """Returns the shapes, dtypes and shardings of the items of a checkpoint, for restoring them."""
        return items_of(self._placed())

    def _placed(self) -> TrainState:
        """Returns the shapes, dtypes and shardings of the state."""
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.abstract, self.shardings
        )

    def step(self, state: TrainState, batch: Arrays, key: Array) -> tuple[TrainState, dict[str, Array]]:
        """Makes one step, compiling the program first if needed; `state` is donated."""
        return self.program({name: x.shape for name, x in batch.items()})(state, batch, key)

    def program(self, batch: ArrayShapes) -> jax.stages.Compiled:
        """Returns the compiled step for a batch of these shapes, from the cache or compiled now.

        The program takes the state, the batch and the dropout key. The state's buffers are donated.
        """
        # A program that waits in the background queue is compiled here instead, because that is sooner. A background
        # compilation that failed is repeated, because it may succeed now.
        program: jax.stages.Compiled = self._programs.find(_key(batch), lambda: self.compile(batch))
        return program

    def is_ready(self, batch: ArrayShapes) -> bool:
        """Returns whether the program for these shapes is already compiled."""
        return _key(batch) in self._programs

    def prepare(self, pairs: Iterable[Pair]) -> None:
        """Compiles the programs for batches of these shapes in a background thread, one after the other."""
        for pair in pairs:
            if pair not in self._prepared:
                self._prepared.add(pair)
                batch = abstract_batch(self.config.train, pair, self.method.choices)
                self._compiler.submit(self._programs.find, _key(batch), partial(self._compile_ahead, batch))

    def close(self) -> None:
        """Ends the background thread; compilations that have not begun are cancelled."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _compile_ahead(self, batch: ArrayShapes) -> jax.stages.Compiled:
        with cli.unneeded():
            return self.compile(batch)

    def compile(self, batch: ArrayShapes) -> jax.stages.Compiled:
        """Compiles the step for a batch of these shapes, for the device type of the mesh."""
        on_gpu = self.mesh.devices.flat[0].platform in ("gpu", "cuda")
        compiled: jax.stages.Compiled = self.lower(batch).compile(compiler_options=GPU_OPTIONS if on_gpu else None)
        return compiled

    def lower(self, batch: ArrayShapes) -> Tree:
        """Lowers the step for a batch of these shapes, for the device type of the mesh."""
        with sharding.named_device(self.mesh.devices.flat[0]):
            return self.trace(batch).lower()

    def trace(self, batch: ArrayShapes) -> Tree:
        """Traces the step for a batch of these shapes, without lowering it."""
        placed = sharding.batch_sharding(self.mesh)
        arrays = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "weights" else jnp.int32, sharding=placed)
            for name, shape in batch.items()
        }
        key = jax.ShapeDtypeStruct((), self.key.dtype, sharding=sharding.replicated(self.mesh))
        with precision(self.model.dtype):
            return self._step.trace(self._placed(), arrays, key)

    def dev_loss(self, params: Tree, arrays: dict[str, np.ndarray]) -> tuple[Array, Array]:
        """Returns the summed loss and the token count of a host batch, without dropout."""
        with precision(self.model.dtype):
            return self._loss(params, sharding.put_batch(arrays, self.mesh))

    def dropout_key(self, step: int) -> Array:
        """Returns the dropout key of a step, counted from 1."""
        return jax.random.fold_in(self.key, step)


def _key(batch: ArrayShapes) -> tuple[tuple[int, ...], ...]:
    return batch["source"], batch["inputs"]


def check_batch(config: Config, mesh: Mesh) -> None:
    """Raises a UserError unless every part of a batch, and every device's share of a part, has whole sequences."""
    train = config.train
    shards, pack = sharding.batch_shards(mesh), pack_size(train)
    if train.batch_size % (shards * train.accumulate):
        raise UserError(
            "train.batch_size",
            found=f"{train.batch_size}",
            expected=f"a multiple of {shards * train.accumulate}",
            hint=f"mesh.data {mesh.shape['data']} x mesh.fsdp {mesh.shape['fsdp']} x "
            f"train.accumulate {train.accumulate}",
        )
    if train.batch_size % (shards * train.accumulate * pack):
        share = train.batch_size // (shards * train.accumulate)
        raise UserError(
            "train.pack",
            found=f"{pack}{('' if train.pack else ' (chosen for the batch size)')}",
            expected=f"a divisor of {share}, the number of examples per device in a part of the "
            f"batch, such as {next(size for size in (4, 3, 2, 1) if share % size == 0)}",
        )
