"""A short training with earlier rows visible completely, in part, or not at all, so that `pipejax probe` may hide them.

A model that has always seen the complete text performs badly when a part is hidden, whether it needs the part or not. A
few hundred updates with the masks of the measurement make the model robust to hidden parts; the remaining loss then
shows which parts the model needs.
"""

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.apps.probe.likelihoods import Condition, Parted, at_once, fit_shapes, likelihoods, padded
from pipejax.checkpoint import Store
from pipejax.config import Config
from pipejax.model.backbone import Module
from pipejax.model.precision import compute_dtype, precision
from pipejax.system import Tree
from pipejax.system.extras import extra
from pipejax.system.progress import Progress
from pipejax.training.optimizer import make_optimizer

with extra("train", "training"):
    import optax

logger = logging.getLogger(__name__)

Array = jax.Array
BATCH = 16  # targets per update
WARMUP = 10  # the warm-up is this fraction of the updates; then the rate decays linearly
SAVED = 50  # updates between two saves: the most that an interruption loses


def adapt(
    config: Config, params: Tree, targets: Sequence[Parted], conditions: Sequence[Condition], updates: int, place: Path
) -> Tree:
    """Returns the parameters after training on the mean negative log-likelihood of all tokens.

    Each update uses targets and conditions drawn at random. An interrupted training continues from its last save.

    Args:
      config: the checkpoint's config.
      params: the parameters, which are copied.
      targets: the training targets.
      conditions: the conditions of the measurement.
      updates: the number of updates.
      place: the directory of the intermediate saves.
    """
    assert config.model is not None
    train = dataclasses.replace(
        config.train,
        steps=updates,
        warmup_steps=max(updates // WARMUP, 1),
        warmup_share=0.0,
        schedule="linear",
        lora_rank=0,
    )
    optimizer = optax.chain(optax.clip_by_global_norm(train.clip_norm), make_optimizer(train))
    module = config.model.module(dtype=compute_dtype(train.dtype))
    program = jax.jit(partial(_update, module, optimizer), donate_argnums=(0, 1))
    size = min(BATCH, len(targets))
    shapes = fit_shapes(targets, size, group=1)

    params = jax.tree.map(jnp.array, params)  # copies, because updates donate their buffers
    items = {"params": params, "state": optimizer.init(params)}
    store = Store(place, keep=1, writable=True)
    shape_of = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding))
    kept = store.newest(lambda _: shape_of(items), set_aside=True)
    items, begun = (kept.items, kept.step) if kept else (items, 0)
    progress = Progress("adapting", updates, unit="update", start=begun)
    try:
        for number in range(begun, updates):
            chance = np.random.default_rng((train.seed, number))
            batch = padded([targets[i] for i in chance.choice(len(targets), size, replace=False)], shapes)
            some = at_once(batch, conditions)
            drawn = chance.choice(np.asarray(conditions, np.int32), some, replace=False, shuffle=False)
            with precision(module.dtype):
                items["params"], items["state"], loss = program(items["params"], items["state"], batch, *drawn.T)
            progress.add(1, f"loss {float(loss):.4f}")
            if (number + 1) % SAVED == 0 or number + 1 == updates:
                store.save(number + 1, items, config=config)
    except KeyboardInterrupt:
        store.settle()
        logger.info(f"--resume continues after update {max(store.steps(), default=0)}")
        raise
    finally:
        progress.close()
        store.close()
    return items["params"]


def _update(
    module: Module,
    optimizer: optax.GradientTransformation,
    params: Tree,
    state: optax.OptState,
    batch: dict[str, Array],
    delay: Array,
    without: Array,
) -> tuple[Tree, optax.OptState, Array]:
    """Makes one update with the mean negative log-likelihood under P conditions; returns the loss as well.

    `delay` and `without` are i32 [P]; `batch` is as for `likelihoods`, with weights f32 [B, N].
    """

    def mean(params: Tree) -> Array:
        weights = batch["weights"][:, None]
        nll = likelihoods(module, params, batch, delay, without) * weights
        return nll.sum() / jnp.maximum(weights.sum(), 1) / len(delay)

    loss, gradient = jax.value_and_grad(mean)(params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss
