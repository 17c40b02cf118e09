"""The optimizer, which turns gradients into updates: schedules, AdamW and Adafactor, and what is left as it is."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax.config import TrainConfig
from pipejax.model import lora
from pipejax.model.backbone import VECTORS
from pipejax.model.sharding import path_of
from pipejax.system import Tree
from pipejax.system.extras import extra

with extra("train", "training"):
    import optax

FROZEN = {"none": (), "encoder": ("encoder/", "shared/")}  # how the paths of parameters begin that are not trained


def warmup(config: TrainConfig) -> int:
    """The number of warm-up updates."""
    return round(config.warmup_share * config.steps) if config.warmup_share else config.warmup_steps


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up to `learning_rate`, then constant, or down to 0 at `steps` in a line or half a cosine."""
    rising, peak = max(warmup(config), 1), config.learning_rate
    rest = max(config.steps - rising, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[config.schedule]
    # Step 1 is count 0: its rate is already above 0, and step `rising` is the first with the full rate.
    return optax.join_schedules([optax.linear_schedule(peak / rising, peak, rising - 1), after], [rising])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW or Adafactor, for gradients clipped already; norms and relative biases do not decay."""

    def decays(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda keys, _: not path_of(keys).endswith(VECTORS), params)

    rate, decay = learning_rate(config), config.weight_decay
    if config.optimizer == "adafactor":
        # Rates are relative to a parameter's own size here (Shazeer and Stern 2018); 1e-3 is usual for T5. optax's own
        # decay for it knows no rate.
        # But not to that of low-rank factors, of which one begins as zero.
        adafactor = optax.adafactor(rate, multiply_by_parameter_scale=not config.lora_rank)
        update = optax.chain(adafactor, _decay(rate, decay, decays))
    else:
        update = optax.adamw(rate, config.beta1, config.beta2, config.epsilon, weight_decay=decay, mask=decays)
    return optax.chain(optax.identity(), update)  # clipping was first here once: so its states are read still


def _decay(rate: optax.Schedule, decay: float, decays: Callable[[Tree], Tree]) -> optax.GradientTransformation:
    """Adds -rate x decay x parameter to finished updates, where `decays` says so."""

    def update(updates: Tree, state: optax.ScaleByScheduleState, params: Tree) -> tuple[Tree, Tree]:
        scale = rate(state.count) * decay
        added = jax.tree.map(lambda u, p, yes: u - scale * p if yes else u, updates, params, decays(params))
        return added, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32)), update
    )


def updates_made(state: optax.OptState) -> jax.Array:
    """The count that the schedule goes by: steps that were left out are not in it."""
    count: jax.Array = optax.tree.get_all_with_path(state, "count")[0][1]
    return count


def trained_paths(config: TrainConfig) -> Callable[[str], bool]:
    return lambda path: not path.startswith(FROZEN[config.freeze]) and (not config.lora_rank or lora.is_factor(path))


def partition(params: Tree, is_trained: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """The trees of parameters that are trained and that are not."""
    flat = flatten_dict(params, sep="/")
    trained = {path: x for path, x in flat.items() if is_trained(path)}
    fixed = {path: x for path, x in flat.items() if path not in trained}
    return unflatten_dict(trained, sep="/"), unflatten_dict(fixed, sep="/")


def combine(trained: Tree, fixed: Tree) -> Tree:
    return unflatten_dict(flatten_dict(trained) | flatten_dict(fixed))
