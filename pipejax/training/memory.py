"""The memory that a training step needs on each device, estimated by arithmetic.

`pipejax plan` prints the estimate, and `train.remat=auto` uses the estimate to choose.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pipejax import methods
from pipejax.config import REMATS, Config, T5Config
from pipejax.system import Tree

if TYPE_CHECKING:
    import jax

    from pipejax.training.step import Trainer

logger = logging.getLogger(__name__)
GIB = 2**30
# The usable share of a device's memory: XLA allocates at most a third more than the estimate (tests/test_plan.py).
ROOM = 0.75


def estimate(
    config: Config,
    shapes: dict[str, tuple[int, ...]],
    *,
    state: int,
    gradients: int,
    layers: int,
    blocks: bool,
    logits: int,
) -> dict[str, float]:
    """Returns the bytes on each device by term.

    Args:
      config: the experiment, with a model that has the arithmetic of a T5.
      shapes: one device's share of one part of a batch; "source" [B, L] and "inputs" [G, N] are used.
      state: bytes of the parameters and the optimizer's moments, float32.
      gradients: bytes of the gradients of the trained parameters, float32.
      layers: the number of parameters in the stacked layers of encoder and decoder.
      blocks: whether attention runs in blocks.
      logits: the most logits computed at once.
    """
    from pipejax.model.precision import compute_dtype

    assert config.model is not None, "`_resolve` checks it"
    model, train = config.model.like_t5(), config.train
    assert isinstance(model, T5Config)
    (batch, length), (groups, slots) = shapes["source"], shapes["inputs"]
    wide = compute_dtype(train.dtype).itemsize
    heads = math.ceil(model.num_heads / config.mesh.tensor)
    inner, hidden = heads * model.d_kv, math.ceil(model.d_ff / config.mesh.tensor)
    gates = 1 if model.feed_forward == "relu" else 2
    # Dropout stores its output beside its input; its mask is recomputed, not stored.
    dropped = wide if train.dropout else 0

    def attention(queries: int, keys: int, rows: int, *, has_band: bool = False) -> dict[str, float]:
        scores = rows * heads * queries * keys
        dots = rows * queries * (inner + model.d_model) * wide
        if blocks:  # apart from the dots, arrays are float32 per query, or gradients of the inputs of the kernels
            # The gradient of the bias: of each near distance, or the sums of buckets.
            band = 2 * model.relative_attention_max_distance * wide
            by_bucket = 4 * 2 + (band if has_band else 4 * model.relative_attention_num_buckets)
            return {
                "dots": dots,
                "rest": rows * queries * (inner * wide + heads * 4),
                "passing": rows * (2 * (queries + keys) * inner * wide + queries * heads * by_bucket),
            }
        return {
            "dots": dots,
            "rest": scores * wide,
            "passing": scores * (4 - wide + dropped),  # the gradient of the scores is float32
        }

    def stream(tokens: int) -> float:
        return tokens * model.d_model * wide

    def feed_forward(tokens: int) -> dict[str, float]:
        return {
            "dots": tokens * (gates * hidden + model.d_model) * wide,
            "rest": tokens * (hidden * wide + model.d_model * (wide + 4)),
            "passing": tokens * (hidden + model.d_model) * dropped,
        }

    tokens, flat = batch * length, groups * slots
    memory = tokens // groups
    encoder = [attention(length, length, batch, has_band=True), feed_forward(tokens)]
    encoder[0]["dots"] += 2 * tokens * inner * wide
    decoder = [attention(slots, slots, groups), attention(slots, memory, groups), feed_forward(flat)]
    decoder[0]["dots"] += 2 * flat * inner * wide
    decoder[1]["dots"] += 2 * tokens * inner * wide
    if train.lora_rank and train.remat == "dots":  # x W and x A B are both results of matrix products
        for cost in (*encoder, *decoder):
            cost["dots"] *= 2
    terms: dict[str, float] = {"parameters and moments": state, "gradient": gradients}
    if train.accumulate > 1:
        terms["sum of the parts' gradients"] = gradients
    if train.remat != "none":
        terms["stacked layers and their gradient"] = (1 if train.lora_rank else 2) * layers * wide
    layered = ((encoder, model.num_layers, tokens, "encoder"), (decoder, model.num_decoder_layers, flat, "decoder"))
    for costs, depth, count, name in layered:
        dots, rest = (sum(cost[kind] for cost in costs) for kind in ("dots", "rest"))
        kept = {"none": dots + rest, "dots": dots, "layers": 0.0}[train.remat]
        terms[f"kept of {depth} {name} layers"] = depth * (kept + stream(count))
        # In the backward pass of a layer, all its activations are alive, and the gradient of one of its parts.
        gradient = max(sum(cost.values()) for cost in costs)
        terms[f"one {name} layer at work"] = dots + rest - kept + gradient
    # Without a scan over layers, the gradient of the encoder's position bias is held for each example.
    copies = 1 + (batch if train.remat == "none" else 1)
    if not blocks:
        terms["position biases and their gradient"] = 4 * heads * (copies * length**2 + 2 * groups * slots**2)
    parts = max(-(-flat * model.vocab_size // logits), 1)
    # A GPU writes the gradient of the logits once, in the compute dtype; a CPU has three float32 arrays.
    each = 4 + wide if blocks else 3 * 4
    terms["logits and their gradient"] = each * (flat // parts) * math.ceil(model.vocab_size / config.mesh.tensor)
    terms["encoded source and its gradient"] = 2 * stream(tokens)
    table = math.ceil(model.vocab_size / config.mesh.tensor) * model.d_model
    if not train.lora_rank:
        # One gradient for the lookups and one for the output head, before they are added.
        terms["gradients of the table, by use"] = 2 * 4 * table
    # The encoder and the decoder are computed one after the other, so only the larger working set counts.
    smaller = min((name for name in terms if "at work" in name), key=terms.__getitem__)
    del terms[smaller]
    work = [name for name in terms if "at work" in name or "kept of" in name]
    # The stacked gradient is split into layers only after the layers' working memory is free, so the two never coexist.
    if blocks and train.remat != "none":
        for name in work if sum(terms[name] for name in work) < gradients else ["gradient"]:
            del terms[name]
    return terms


def longest_batch(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the arrays of a batch whose sources and targets all have their maximum length."""
    from pipejax.data.batches import abstract_batch, longest

    return abstract_batch(config.train, longest(config), methods.trained(config).choices)


def estimator(trainer: "Trainer") -> Callable[[Config], dict[str, float]]:
    """Returns `estimate` with the array sizes of this trainer filled in."""
    import jax

    from pipejax.methods.losses import most_logits
    from pipejax.model import sharding

    def held(tree: Tree, shardings: Tree) -> int:
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
        return sum(math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize for x, where in pairs)

    config = trainer.config
    shards = sharding.batch_shards(trainer.mesh) * config.train.accumulate
    part = {name: (shape[0] // shards, *shape[1:]) for name, shape in longest_batch(config).items()}
    params, where = trainer.abstract.params, trainer.shardings.params
    stacks = [{name: tree[name] for name in ("encoder", "decoder")} for tree in (params, where)]
    trained = [trainer.trained(tree) for tree in (params, where)]
    return partial(
        estimate,
        shapes=part,
        state=held(trainer.abstract, trainer.shardings),
        gradients=held(*trained),
        layers=held(*stacks) // 4,
        blocks=trainer.blocks is not None,
        logits=most_logits(trainer.mesh.devices.flat[0].platform),
    )


def device_memory() -> int | None:
    """Returns the bytes that JAX may allocate on each local device, or None if a device does not report them."""
    import jax

    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    known = [int(limit) for limit in limits if limit]
    return min(known) if len(known) == len(limits) else None


def choose_remat(config: Config, memory: float | None, devices: "Sequence[jax.Device] | None" = None) -> Config:
    """Replaces "auto" in `train.remat` by the fastest choice that leaves a quarter of the memory free; logs the choice.

    If the memory or the model's arithmetic is unknown, the choice is to recompute nothing ("none").

    Args:
      config: the experiment.
      memory: bytes on each device; None: unknown.
      devices: the devices of the mesh; None: this machine's devices.
    """
    from pipejax.model.precision import compute_dtype
    from pipejax.training.step import Trainer

    train = config.train
    if train.remat != "auto":
        return config
    choices = [dataclasses.replace(config, train=dataclasses.replace(train, remat=remat)) for remat in REMATS[1:]]
    if memory is None or not isinstance(config.model, T5Config):
        return choices[0]
    estimate_of, totals = estimator(Trainer(choices[0], devices)), dict[str, float]()
    for choice in choices:
        own = dataclasses.replace(choice.train, dtype=compute_dtype(train.dtype).name)
        totals[own.remat] = sum(estimate_of(dataclasses.replace(choice, train=own)).values())
        if totals[own.remat] <= ROOM * memory:
            break
    why = (
        "the fastest value that leaves a quarter of it free"
        if totals[own.remat] <= ROOM * memory
        else "the value that needs the least memory"
    )
    found = ", ".join(f"{total / GIB:.1f} GiB with {remat}" for remat, total in totals.items())
    logger.info(f"train.remat: {own.remat} for {memory / GIB:.1f} GiB, {why}; estimated memory of a step: {found}")
    return choice
