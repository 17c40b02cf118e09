"""The branching decoder of One2Branch (Huang et al., ICLR 2024), for sets of phrases such as keyphrases.

A phrase continues with every token whose logit is above 0, so that phrases with a common beginning share it and branch
after it. Phrases do not see one another, and their order in a target does not matter.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipejax import grid
from pipejax.methods import Ids, Method, Spells, Target, spell
from pipejax.system.fields import setting

if TYPE_CHECKING:
    from jax import Array

    from pipejax.decoding import Strategy

CHOICES = 32  # the most target tokens of a slot, and the most phrases


@dataclasses.dataclass(frozen=True)
class Branching(Method):
    """A set of phrases, in descending order of their mean logits."""

    rows: int = setting(20, least=1, most=CHOICES)  # the most phrases, and the most phrases that are open in a step
    times: int = setting(32, least=2, most=2**15)  # the most tokens of a phrase, its end token included
    least: int = setting(1, least=1, most=CHOICES)  # continue the best phrases below 0, too, until this number ended

    name: ClassVar[str] = "branching"
    choices: ClassVar[int] = CHOICES

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """See `Method`. The layout has a slot for each token of each phrase. A slot has several target tokens.

        The target tokens of a slot are those with which a phrase of the target continues after the same beginning. A
        beginning that several phrases share counts once. The first phrase has the latest times and the last one the
        earliest, so that no phrase sees another one. Phrases that are too long or too many are left out. If no phrase
        is left, the first phrase is cut.
        """
        spelled = [*dict.fromkeys(tuple(row) for row in spell(rows, spells, ids.ends) if row)]
        kept = [row for row in spelled if len(row) < self.times][: self.rows]
        kept = kept[: int((np.cumsum([len(row) + 1 for row in kept]) <= most).sum())]
        is_open = bool(spelled) and not kept
        if not kept:
            kept = [spelled[0][: min(self.times, most) - 1] if spelled else ()]
        following = dict[tuple[int, ...], dict[int, None]]()  # the target tokens after each beginning of a phrase
        for row in kept:
            for j, token in enumerate((*row, ids.eos)):
                following.setdefault(row[:j], {})[token] = None
        size = sum(len(row) + 1 for row in kept)
        inputs, row_of, time = (np.zeros(size, np.int32) for _ in range(3))
        targets, weights = np.full((size, CHOICES), ids.eos, np.int32), np.zeros((size, CHOICES), np.float32)
        slot = 0
        for i, row in enumerate(kept):
            later = sum(len(other) + 1 for other in kept[i + 1 :])
            for j, token in enumerate((ids.bos, *row)):
                right = [*following[row[:j]]]
                inputs[slot], row_of[slot], time[slot] = token, i, later + j
                targets[slot, : len(right)] = right
                is_first = all(row[:j] != other[:j] for other in kept[:i])
                weights[slot, : len(right)] = float(is_first)
                slot += 1
        if is_open:
            weights[-1] = 0.0  # the phrase was cut, so the data has no end at this place
        return Target(grid.Flat(inputs, targets, weights, row_of, time), len(kept) < len(spelled) or is_open)

    def most_slots(self, most: int) -> int:
        """See `Method`. A target has one slot for each token."""
        return most

    def loss(self, logits: "Array", targets: "Array", weights: "Array") -> "tuple[Array, Array]":
        """See `Method`. The loss raises logits of target tokens above 0, and lowers others below 0 (Su et al. 2022).

        The loss (ZLPR) is log(1 + Σ exp(-s)) over the target tokens plus log(1 + Σ exp(s)) over all other tokens, for
        logits s.
        """
        import jax.numpy as jnp

        token, is_right = jnp.arange(logits.shape[-1]), jnp.zeros(logits.shape, bool)
        for choice in range(targets.shape[-1]):
            is_right |= (token == targets[..., choice, None]) & (weights[..., choice, None] > 0)
        found, counts = _log_one_plus(-logits, is_right) + _log_one_plus(logits, ~is_right), weights.max(axis=-1)
        return (found * counts).sum(), counts.sum()

    def strategy(self, ids: Ids) -> "Strategy":
        """Returns the strategy `Branches`, algorithm 1 of the One2Branch paper."""
        from pipejax.apps.family.branches import Branches

        return Branches(self.rows, self.times, self.least, ids.bos, ids.eos, ids.other_ends)

    def learned(self) -> dict[str, object]:
        """Returns no settings, because all settings only limit answers."""
        return {}


def _log_one_plus(x: "Array", counts: "Array") -> "Array":
    """Returns log(1 + Σ exp(x)) over the entries of the last axis for which `counts` is True.

    Neither the result nor its gradient overflows.
    """
    import jax
    import jax.numpy as jnp

    top = jax.lax.stop_gradient(jnp.maximum(jnp.where(counts, x, 0).max(axis=-1, keepdims=True), 0))
    terms = jnp.where(counts, jnp.exp(jnp.where(counts, x, top) - top), 0)
    return top[..., 0] + jnp.log(jnp.exp(-top[..., 0]) + terms.sum(axis=-1))
