"""Errors and times of attention on a GPU: a part of `lab.benchmarks.gpu`."""

import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lab.benchmarks import profile
from lab.benchmarks.gpu import Case, Result
from lab.benchmarks.profile import least
from pipejax.kernels import block_attention
from pipejax.model.attention import attend
from pipejax.model.layers import buckets
from pipejax.model.slots import Blocks, Distances, Seen, Slots

Array = jax.Array
ARRAYS = ("output", "gradient of queries", "gradient of keys", "gradient of values", "gradient of the bias table")


def cases(rehearse: bool) -> list[Case]:
    """Errors of attention in blocks and of XLA's attention in bfloat16, compared with float32, and times of both."""
    interpret = jax.default_backend() != "gpu"
    kinds, few, many = ("encoder", "decoder", "cross"), *((1, 1) if rehearse else (2, 6))

    def errors(kind: str) -> Callable[[], list[Result]]:
        return Attention(kind, rehearse, batch=few).errors()

    def times(kind: str, by: str) -> Callable[[], Result]:
        return Attention(kind, rehearse, batch=many).times(by)

    compared = [Case(kind, partial(errors, kind), timed=False) for kind in kinds]
    pairs = itertools.product(kinds[2 * rehearse :], ("blocks", "XLA"))
    timed = [Case(f"{kind}, {by}", partial(times, kind, by)) for kind, by in pairs]
    widths = (16,) if rehearse else (64, 128)
    trials = [Case(f"heads of {x}", partial(difference, x, interpret), timed=False) for x in widths]
    return [*compared, *timed, *trials]


def difference(width: int, interpret: bool) -> Callable[[], Result]:
    """Makes the comparison that pipejax makes before it uses the kernels."""
    apart = float(block_attention.difference(width, interpret=interpret))
    return lambda: {"apart": apart, "agrees": apart < block_attention.TOLERANCE}


class Attention:
    """Attention of T5-Base in the paper's setting: an encoder's, a decoder's, or from a decoder to an encoder."""

    def __init__(self, kind: str, rehearse: bool, *, batch: int) -> None:
        """Draws random queries, keys, values and gradients."""
        heads, width, source, slots = (2, 16, 96, 64) if rehearse else (12, 64, 2048, 768)
        tokens, slot = jnp.arange(source), jnp.arange(slots)
        real = jnp.full((batch, 1), source).at[0].set(source * 3 // 4)  # one source is shorter
        row, time_ = (jnp.broadcast_to(x, (batch, slots)) for x in (slot // 48, slot % 48))
        place = jnp.broadcast_to(tokens, (batch, source))
        encoder = Slots(jnp.where(tokens < real, 0, -1), position=place, consecutive=True)
        decoder = Slots(jnp.zeros_like(row), row, time_, row + time_)
        sides = {"encoder": (encoder, encoder), "decoder": (decoder, decoder)}
        self.queries, self.keys = sides.get(kind) or (Slots(decoder.example), Slots(encoder.example))
        rng = np.random.default_rng(0)

        def draw(slots: Slots, scale: float = width**-0.25) -> Array:
            shape = batch, heads, slots.example.shape[1], width
            return jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)

        self.given: tuple[Array, ...] = draw(self.queries), draw(self.keys), draw(self.keys)
        self.gradient, self.seed = draw(self.queries, 1.0), jnp.asarray([1, 2], jnp.uint32)
        if kind != "cross":  # cross-attention has no bias
            self.given = *self.given, jnp.asarray(rng.standard_normal((32, heads)), jnp.float32)
        near = buckets(np.arange(129), count=16, longest=128)
        self.bucket = jnp.asarray(np.concatenate([near[:0:-1], near[:1], near[1:] + 16])[::-1])
        self.scores = batch * heads * self.queries.example.shape[1] * self.keys.example.shape[1]

    def by_blocks(self, queries: Array, keys: Array, values: Array, *table: Array) -> Array:
        """Attention by pipejax's kernels."""
        distances = Distances(table[0], self.bucket) if table else None
        seen = Seen(self.queries, self.keys, distances, Blocks(interpret=jax.default_backend() != "gpu"))
        return block_attention.attend_in_blocks(queries, keys, values, seen, self.seed, 0.1)

    def by_xla(self, queries: Array, keys: Array, values: Array, *table: Array) -> Array:
        """Attention by XLA, with an array of queries by keys."""
        of_queries = jax.tree.map(lambda x: x[:, :, None], self.queries)
        of_keys = jax.tree.map(lambda x: x[:, None], self.keys)
        seen = (of_queries.example == of_keys.example) & (of_keys.example >= 0)
        if of_queries.row is not None:
            seen &= (of_keys.row <= of_queries.row) & (of_keys.time <= of_queries.time)
        bias = jnp.where(seen, 0.0, -1e9)[:, None]
        if table:
            # All examples have the same distances.
            apart = jnp.clip(of_queries.position - of_keys.position + 128, 0, 256)[:1]
            bias = bias + jnp.moveaxis(table[0][self.bucket[apart]], -1, 1)
        return attend(queries, keys, values, bias, self.seed, 0.1)

    def differentiate(self, function: Callable[..., Array], gradient: Array, *given: Array) -> tuple[Array, ...]:
        """The output and the gradients of all arguments."""
        real = (self.queries.example >= 0)[:, None, :, None]
        found, back = jax.vjp(lambda *x: jnp.where(real, function(*x), 0), *given)
        return (found, *back(gradient))

    def errors(self) -> Callable[[], list[Result]]:
        """Compiles attention; the function returned computes norms of differences from float32, divided by norms."""
        given = self.gradient, *self.given
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(partial(self.differentiate, self.by_xla))(*(x.astype(jnp.float32) for x in given))
        both = [jax.jit(partial(self.differentiate, x))(*given) for x in (self.by_blocks, self.by_xla)]
        found = []
        for name, truth, *rounded in zip(ARRAYS, exact, *both, strict=False):  # without a bias there is no table
            apart = [float(jnp.linalg.norm(x.astype(jnp.float32) - truth)) for x in rounded]
            ours, theirs = (each / float(jnp.linalg.norm(truth)) for each in apart)
            found.append({"array": name, "blocks_error": ours, "xla_error": theirs})
        return lambda: found

    def times(self, by: str) -> Callable[[], Result]:
        """Compiles attention, and attention with its gradients; the function returned measures both."""
        function, given = self.by_blocks if by == "blocks" else self.by_xla, (self.gradient, *self.given)
        alone = jax.jit(function).lower(*self.given).compile()
        both = jax.jit(partial(self.differentiate, function)).lower(*given).compile()

        def measuring() -> Result:
            found = {"forward_s": least(partial(alone, *self.given)), "both_s": least(partial(both, *given))}
            return found | {"scores": self.scores} | profile.try_profile(lambda: jax.block_until_ready(both(*given)))

        return measuring
