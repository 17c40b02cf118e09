"""Beam search for the sequential decoder, the stronger baseline. The rows of the grid are the beams."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from pipejax.decoding.gathering import Query
from pipejax.decoding.strategy import TRUNCATIONS, Array, Decoded, Plain, SourceIds, ends_of, is_end
from pipejax.grid import Numbers


@flax.struct.dataclass
class BeamState:
    """The state after t steps: K live hypotheses, best first, and the best finished one."""

    step: Array  # i32 scalar, t
    tokens: Array  # i32 [B, K, max_length], the generated tokens of the live hypotheses
    last: Array  # i32 [B, K], their newest tokens
    lineage: Array  # i32 [B, K, max_length], the row in which each token of a hypothesis was fed
    scores: Array  # f32 [B, K], log-probabilities; -inf where there is no hypothesis yet
    best: Array  # i32 [B, max_length], the tokens of the best finished hypothesis
    length: Array  # i32 [B], the number of its tokens, the end token included
    ended: Array  # bool [B], whether the best finished hypothesis ended with an end token
    finished: Array  # f32 [B, K], penalised scores of the K best finished hypotheses, best first; -inf for none
    steps: Array  # i32 [B], steps until the example was done
    done: Array  # bool [B]


@dataclasses.dataclass(frozen=True)
class Beam(Plain):
    """Beam search with `beams` hypotheses, scored by log-probability / length**length_penalty.

    The search is the same as in Hugging Face's `generate` with its default early_stopping=False. Each step keeps the
    best `beams` continuations without an end token. A continuation with an end token is finished if it is among the
    best `beams` of all continuations. A hypothesis of `max_length` tokens is finished as it is. The search is over once
    `beams` hypotheses are finished and the worst of them is better than the best live one at its present length.

    When a beam continues another one, nothing is moved in the cache: the mask of its queries follows its lineage.
    """

    max_length: int  # tokens, the end token included
    beams: int  # K; the vocabulary must have at least M tokens, see `candidates`
    length_penalty: float = 1.0
    bos: int = 0
    eos: int = 1
    other_ends: tuple[int, ...] = ()  # further tokens that end a hypothesis

    @property
    def candidates(self) -> int:
        """M = K (1 + E) with E end tokens, so at least K of M continuations have no end token."""
        return self.beams * (1 + len(ends_of(self)))

    @property
    def most_queries(self) -> int:
        """One query for each beam."""
        return self.beams

    @property
    def slots(self) -> int:
        """One slot for bos, then one for each beam and step."""
        return 1 + self.beams * (self.max_length - 1)

    def start(self, row: Numbers) -> Numbers:
        """Returns 0 for all rows."""
        return 0 * row

    def init(self, batch: int, source: SourceIds | None = None) -> BeamState:
        """Returns the state with one hypothesis, bos alone, in the first row."""
        tokens = jnp.zeros((batch, self.beams, self.max_length), jnp.int32)
        none, zeros = jnp.full((batch, self.beams), -jnp.inf), jnp.zeros(batch, jnp.int32)
        return BeamState(
            step=jnp.int32(0),
            tokens=tokens,
            last=tokens[:, :, 0] + self.bos,
            lineage=tokens,
            scores=none.at[:, 0].set(0.0),
            best=tokens[:, 0],
            length=zeros,
            ended=zeros > 0,
            finished=none,
            steps=zeros,
            done=zeros > 0,
        )

    def query(self, state: BeamState) -> tuple[BeamState, Query]:
        """Feeds the newest token of each hypothesis, which sees the tokens of its lineage."""
        row = jnp.arange(self.beams)[None]
        live = ~state.done[:, None] & (state.scores > -jnp.inf)
        return state, Query(state.last, row, jnp.full_like(row, state.step), live, lineage=state.lineage)

    def choose(self, logits: Array) -> tuple[Array, Array]:
        """Returns the log-probabilities f32 [N, M] and ids i32 [N, M] of the M most likely tokens of each query."""
        best, ids = jax.lax.top_k(logits.T, self.candidates)
        return best - jax.nn.logsumexp(logits, axis=0)[:, None], ids

    def advance(self, state: BeamState, answers: tuple[Array, Array]) -> BeamState:
        """Selects the finished and the live hypotheses among all continuations of an example."""
        values, ids = answers
        batch, step = values.shape[0], state.step + 1
        full, by_length = step == self.max_length, step.astype(jnp.float32) ** self.length_penalty
        scores, place = jax.lax.top_k((state.scores[:, :, None] + values).reshape(batch, -1), self.candidates)
        parent, found = place // values.shape[2], jnp.take_along_axis(ids.reshape(batch, -1), place, axis=1)

        def continued(which: Array) -> tuple[Array, Array, Array]:
            """Returns tokens, newest token and lineage of the candidates with the indices `which`, i32 [B, n]."""
            parents = jnp.take_along_axis(parent, which, axis=1)[:, :, None]
            last = jnp.take_along_axis(found, which, axis=1)
            tokens, lineage = (jnp.take_along_axis(x, parents, axis=1) for x in (state.tokens, state.lineage))
            return tokens.at[:, :, step - 1].set(last), last, lineage

        is_last = is_end(found, ends_of(self))
        ends = (is_last | full) & (jnp.arange(self.candidates) < self.beams) & ~state.done[:, None]
        ending = jnp.where(ends, scores / by_length, -jnp.inf)
        finished = jax.lax.top_k(jnp.concatenate([state.finished, ending], axis=1), self.beams)[0]
        first = ending.argmax(axis=1)[:, None]
        better = (ending.max(axis=1) > state.finished[:, 0])[:, None]
        going, kept = jax.lax.top_k(jnp.where(is_last, -jnp.inf, scores), self.beams)
        tokens, last, lineage = continued(kept)
        over = (going[:, 0] / by_length <= finished[:, -1]) | full
        return BeamState(
            step=step,
            tokens=tokens,
            last=last,
            lineage=lineage.at[:, :, step].set(jnp.arange(self.beams)),
            scores=going,
            best=jnp.where(better, continued(first)[0][:, 0], state.best),
            length=jnp.where(better[:, 0], step, state.length),
            ended=jnp.where(better, jnp.take_along_axis(is_last, first, axis=1), state.ended[:, None])[:, 0],
            finished=finished,
            steps=jnp.where(state.done, state.steps, step),
            done=state.done | over,
        )

    def done(self, state: BeamState) -> Array:
        """Returns whether each example is done, bool [B], as `advance` determined."""
        return state.done

    def result(self, state: BeamState) -> Decoded:
        """Returns one row, the best finished hypothesis."""
        code = jnp.where(state.ended, TRUNCATIONS.index(None), TRUNCATIONS.index("max_length"))
        return Decoded(
            tokens=state.best[:, None],
            lengths=(state.length - state.ended)[:, None],
            steps=state.steps,
            truncated=code.astype(jnp.int32),
        )
