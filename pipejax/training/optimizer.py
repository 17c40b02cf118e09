"""The optimizer: learning rate schedules, AdamW and Adafactor, and the split into trained and frozen parameters."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax.config import TrainConfig
from pipejax.model import auxiliary, lora
from pipejax.model.backbone import ENCODER, VECTORS
from pipejax.model.sharding import path_of
from pipejax.system import Tree
from pipejax.system.extras import extra

with extra("train", "training"):
    import optax

FROZEN = {  # prefixes of the paths of parameters that are frozen
    "none": (),
    "encoder": ENCODER,
}


def warmup(config: TrainConfig) -> int:
    """Returns the number of warm-up updates."""
    return round(config.warmup_share * config.steps) if config.warmup_share else config.warmup_steps


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Returns the schedule: linear warm-up to `learning_rate`, then constant, linear or cosine.

    The linear and the cosine schedule decay to 0 at `steps`.
    """
    rising, peak = max(warmup(config), 1), config.learning_rate
    rest = max(config.steps - rising, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[config.schedule]
    # Step 1 has count 0. Its rate is already above 0, and step `rising` is the first one with the full rate.
    return optax.join_schedules([optax.linear_schedule(peak / rising, peak, rising - 1), after], [rising])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW or Adafactor, without weight decay for norms and relative biases.

    The gradients must be clipped already.
    """

    def decays(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda keys, _: not path_of(keys).endswith(VECTORS), params)

    rate, decay = learning_rate(config), config.weight_decay
    if config.optimizer == "adafactor":
        # Adafactor scales each update by the parameter's own magnitude (Shazeer and Stern 2018); 1e-3 is a usual rate
        # for T5. This scaling is off for low-rank factors, because one of them starts at zero. The weight decay of
        # optax.adafactor ignores the schedule, so `_decay` replaces it.
        adafactor = optax.adafactor(rate, multiply_by_parameter_scale=not config.lora_rank)
        update = optax.chain(adafactor, _decay(rate, decay, decays))
    else:
        update = optax.adamw(rate, config.beta1, config.beta2, config.epsilon, weight_decay=decay, mask=decays)
    # Keeps the place of the clipping of former releases, so that their optimizer states can still be restored.
    return optax.chain(optax.identity(), update)


def _decay(rate: optax.Schedule, decay: float, decays: Callable[[Tree], Tree]) -> optax.GradientTransformation:
    """Adds -rate x decay x parameter to the final updates of those parameters that `decays` selects."""

    def update(updates: Tree, state: optax.ScaleByScheduleState, params: Tree) -> tuple[Tree, Tree]:
        scale = rate(state.count) * decay
        added = jax.tree.map(lambda u, p, yes: u - scale * p if yes else u, updates, params, decays(params))
        return added, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32)), update
    )


def updates_made(state: optax.OptState) -> jax.Array:
    """Returns the count that the schedule uses, i32 []; skipped updates are not counted."""
    count: jax.Array = optax.tree.get_all_with_path(state, "count")[0][1]
    return count


def trained_paths(config: TrainConfig) -> Callable[[str], bool]:
    """Returns a function of a parameter's path: whether `train.freeze` and `train.lora_rank` let it be trained."""
    if config.freeze == "backbone":
        return lambda path: path.startswith(f"{auxiliary.ITEM}/")
    return lambda path: not path.startswith(FROZEN[config.freeze]) and (not config.lora_rank or lora.is_factor(path))


def partition(params: Tree, is_trained: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """Splits the parameters into two trees: the trained and the frozen ones."""
    flat = flatten_dict(params, sep="/")
    trained = {path: x for path, x in flat.items() if is_trained(path)}
    fixed = {path: x for path, x in flat.items() if path not in trained}
    return unflatten_dict(trained, sep="/"), unflatten_dict(fixed, sep="/")


def combine(trained: Tree, fixed: Tree) -> Tree:
    """Merges the two trees of `partition` into one."""
    return unflatten_dict(flatten_dict(trained) | flatten_dict(fixed))
