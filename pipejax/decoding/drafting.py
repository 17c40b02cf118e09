"""Speculative decoding of rows: a drafter guesses the next tokens of each row, and one call verifies all guesses.

In a call each open row feeds its newest token and the tokens drafted after it, as one column each. The model generates
a token for every column. A drafted token is correct if it equals the token that the model generates from the column
before it. By `grid.visible` (paper section 3.2, eq. 4), a token generated from a query at time t depends on the tokens
up to time t of its own row and of the rows above (the rows with lower numbers). So the generated token is accepted only
if all of these tokens are correct and were fed, in this call or an earlier one. The accepted tokens are therefore
exactly the tokens of greedy decoding. The cache slots of rejected tokens are hidden.

The rule for a query of row i at time t in a call: its token is accepted if and only if the fed tokens up to time t are
correct in row i and in each open row above it. The token that a call generates after the last draft of a row was not
fed in this call, so rows below cannot rely on it before the next call. A row that has ended does not limit the rows
below it, and row 0 is limited by no other row.

Forced tokens, such as row names (`forced`), are drafts that are always correct, so each call feeds all forced tokens
that it can accept. The drafter sees these tokens as generated tokens, and drafts the tokens after them.

A row begins once the rows above it are generated up to its start time. If the drafts of the rows above reach this time,
the row is queried in the same call, and begins if these drafts are accepted.

Example with a delay of 1 and two drafted tokens: row 0 feeds its newest token a at time 3 and the drafts b and c at
times 4 and 5, and row 1 feeds x, y and z at the same times. If the model generates b from a but not c from b, row 0
gains b and the model's token in place of c, and its tokens are known up to time 5. The column of z, at time 5, depends
on c, so row 1 gains at most two tokens, even if y and z are correct.

Drafting is not part of the paper, which calls speculative decoding orthogonal to its method. The rule above follows
from equation 4, so drafts change no answer.

Shapes: B batch, R rows of the grid, T the most tokens of a row, D the most tokens of a row that a drafter drafts in a
call, C the most drafted and forced tokens of a row in a call, P the probe columns of a row in a call.
"""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax.numpy as jnp

from pipejax.decoding import repeated_parts
from pipejax.decoding import trace as tracing
from pipejax.decoding.core import QUERY_COUNTS
from pipejax.decoding.draft_lengths import TrackRecord, choose_lengths
from pipejax.decoding.drafters.drafter import Draft, Drafter, Probed, Setting, Written
from pipejax.decoding.drafters.drafter_checks import check_draft
from pipejax.decoding.forced import after_forced, append_forced, find_forced
from pipejax.decoding.gathering import CERTAIN, DRAFTED, PROBE, Query, count_slots
from pipejax.decoding.rows import OnGrid, Rows, RowState
from pipejax.decoding.strategy import Array, SourceIds, ends_of, is_end, wants
from pipejax.decoding.strategy_checks import check_rows, check_state
from pipejax.decoding.times import NEVER, count_before
from pipejax.system import Tree

DRAFTED_QUERY_COUNTS = (8, 12, 20, 32, 48, 128)  # `core.QUERY_COUNTS` for a drafted step whose fillers cost time


@flax.struct.dataclass
class DraftState:
    """The part of the state that exists only with drafts, for each example."""

    calls: Array  # i32 [B], decoder calls that answered the example
    used: Array  # i32 [B], number of cache slots that these calls used
    apart: bool = flax.struct.field(pytree_node=False)  # whether examples count their slots separately
    fed: Array  # i32 [B, 1 + C, R], the newest token of each row in the last call, and its drafts
    live: Array  # bool [B, 1 + C, R], whether each of these tokens was fed
    kept: Array  # bool [B, 1 + C + P, R], whether each of these tokens was accepted; False for probe columns
    forced: Array  # i32 [B, R], the number of forced tokens with which the last drafts began
    trust: Array  # i32 [B, R], the drafter's confidence in the last drafts, an index into `Drafter.odds`
    record: TrackRecord  # how often drafts were correct
    guesses: Array  # i32 [B, R, D], the model's tokens after the accepted ones
    guessed: Array  # i32 [B, R], number of tokens in `guesses`
    drafter: Tree  # the state of the drafter
    probed: Probed | None  # as in `Written`
    hidden: Array | None  # [B, R, W], as in `Written`
    trace: tracing.Trace | None = None  # which drafts were fed and accepted in each call, if `Drafts.trace`


class Verdict(NamedTuple):
    """The comparison of a call's drafts with the model's tokens; arrays [B, R]."""

    asks: Array  # bool, whether the row had queries
    run: Array  # i32, number of drafted tokens before the first incorrect one
    limit: Array  # i32, number of drafted columns that the rows above allow; -1: not even the newest token's column
    gain: Array  # i32, number of tokens that the row gains if it has begun
    ends: Array  # bool, whether the last of the gained tokens is an end token


@dataclasses.dataclass(frozen=True)
class Drafts:
    """The settings of drafting for a strategy `Rows`, such as the drafter and the number of drafts. Static under jit.

    A drafted token that is rarely correct is not worth the time of its column: see `choose_lengths`.
    """

    drafter: Drafter | None  # None: the only drafts are forced tokens
    tokens: int = 8  # D, the most tokens of a row that the drafter drafts in a call
    forced: int = 0  # the most forced tokens of a row in a call
    query_counts: tuple[int, ...] = ()  # the sizes of a batch's calls to compile for, ascending, without the largest
    fixed: float = 3.0  # the fixed cost of a call, in units of the cost of a column
    rounded: bool = True  # whether the cost of a call counts all columns of its size, or only the columns that are fed
    trace: bool = False  # whether to record which drafts were fed and accepted (`Decoded.trace`)
    names: OnGrid | None = None  # the strategy whose `cut` gives the codes of `Decoded.truncated`; None: the rows
    source: SourceIds | None = None  # the sources of a batch, while its decode is traced: see `bind_source`
    table: Array | None = None  # i32 [B, R, T], the forced tokens of the batch, as in `DecodingOptions`

    def width(self, rows: Rows) -> int:
        """Returns 1 + C, the number of columns of a row in a call."""
        return 1 + max(min(max(self.tokens, self.forced), rows.time_max - 1), 1)

    @property
    def probes(self) -> int:
        """P, the number of probe columns of a row in a call."""
        return getattr(self.drafter, "probes", 0)

    def columns(self, rows: Rows) -> int:
        """Returns 1 + C + P, the number of columns of a row in a call, with its probes."""
        return self.width(rows) + self.probes

    def most(self, rows: Rows) -> int:
        """Returns D, or the largest number of tokens that can follow the first one of a row if that is smaller."""
        return max(min(self.tokens, rows.time_max - 1), 1)

    def slots(self, rows: Rows) -> int:
        """Returns the most slots of an example: twice the size of a full grid, and the slots of a call's probes.

        The slots of probes are free again after the call. `query` stops drafting before all slots are in use.
        """
        return rows.rows * (2 * rows.time_max + self.probes)

    def tuned_for(self, platform: str, rows: int, *, costs: float, skips_fillers: bool) -> "Drafts":
        """Sets sizes and costs of calls for a platform and a grid of `rows` rows; see `Strategy.tuned_for`."""
        if self.drafter is None:  # most calls feed one token of a row, as without drafts
            one = (1,) if rows == 1 else ()
            return dataclasses.replace(self, query_counts=(*one, *QUERY_COUNTS) if platform == "cpu" else ())
        if platform != "cpu":  # hundreds of columns take as long as a few, as reading the weights dominates
            return dataclasses.replace(self, query_counts=(64, 256), fixed=256.0)
        one_row = (1, 2, 4) if rows == 1 else ()
        if skips_fillers:  # sizes hardly differ in cost, and each of them is one more loop
            return dataclasses.replace(self, query_counts=() if one_row else QUERY_COUNTS, fixed=costs, rounded=False)
        return dataclasses.replace(self, query_counts=(*one_row, *DRAFTED_QUERY_COUNTS), fixed=costs)

    def bind_source(self, source: SourceIds, rows: Rows) -> "Drafts":
        """Binds the sources of a batch, which the drafter gets in each call, with the parameters if it wants them.

        The forced tokens are bound apart from the sources.
        """
        parameters = source.parameters if wants(self.drafter, "parameters") else None
        setting = Setting(rows, self.most(rows), self.query_counts)
        own = dataclasses.replace(source, parameters=parameters, setting=setting, forced=None)
        return dataclasses.replace(
            self, source=own, table=None if source.forced is None else jnp.asarray(source.forced)
        )

    def init_drafter(self, source: SourceIds, rows: int) -> Tree:
        """Returns the state of the drafter before the first call, for a grid of `rows` rows."""
        if self.drafter is None:
            return None
        state = self.drafter.init(self.source or source, rows)
        if not getattr(self.drafter, "loops", False):
            check_rows(self.drafter, "init", state, (len(source.ids),))
        return state

    def init(self, rows: Rows, batch: int, source: SourceIds | None) -> DraftState:
        """Returns the state before the first call."""
        assert source is not None, "drafters read the source"
        none = jnp.zeros((batch, rows.rows), jnp.int32)
        width = self.width(rows)
        asked = jnp.zeros((batch, width, rows.rows), jnp.int32)
        return DraftState(
            calls=none[:, 0],
            used=none[:, 0],
            apart=source.apart,
            fed=asked,
            live=asked > 0,
            kept=jnp.zeros((batch, self.columns(rows), rows.rows), bool),
            forced=none,
            trust=none,
            record=TrackRecord.empty(batch, len(self.drafter.odds) if self.drafter else 0),
            guesses=jnp.zeros((batch, rows.rows, self.most(rows)), jnp.int32),
            guessed=none,
            drafter=self.init_drafter(source, rows.rows),
            probed=self._no_probes(batch, rows.rows),
            hidden=self._no_hidden(batch, rows.rows),
            # At most one call for each time-step, since the open row that is furthest behind grows in every call.
            trace=tracing.empty(batch, rows.time_max, rows.rows, width - 1) if self.trace else None,
        )

    def query(self, rows: Rows, state: RowState) -> tuple[RowState, Query]:
        """Returns the queries of a call: lines 5-8 of Algorithm 1, for several time-steps of a row at once.

        A call feeds the newest token and the drafts of each open row, the bos and the drafts of rows that may begin,
        and end tokens that are not fed yet. Drafts begin with the forced tokens that can be accepted. The number of
        drafts after them is chosen in three steps: the drafter offers a number of tokens (`offered`); tokens that the
        call cannot accept because of the rows above are removed (`useful`); and `choose_lengths` keeps the tokens that
        are worth their cost.
        """
        assert state.drafts is not None
        old, width, index = state.drafts, self.width(rows), jnp.arange(rows.rows)
        columns = jnp.arange(width)
        newest, is_open = rows.first + state.length, rows.find_open(state)
        most = jnp.where(rows.is_closed(state) | state.done, 0, rows.rows)
        begins = (index >= state.started[:, None]) & (index < most[:, None])
        has_room = self._has_room(rows, old)[:, None]
        may_draft = (is_open | begins) & has_room

        def reach(drafted: Array, before_end: Array) -> tuple[Array, Array]:
            """Computes how much a call can accept if `drafted` tokens of each row are fed and all are correct.

            Args:
              drafted: i32 [B, R].
              before_end: i32 [B, R], number of drafts of each row before the first end token.

            Returns:
              bool [B, R], the rows that have queries; i32 [B, R], the number of drafts of each that can be accepted.
            """
            # A row whose draft has ended does not limit rows below it. No row starts after an empty one.
            closes = (state.length + before_end == 0) & (rows.delay > 0)
            far = jnp.where(before_end < drafted, jnp.where(closes, -1, NEVER), newest + drafted)
            limit = rows.least_above(jnp.where(is_open | begins, far, NEVER))
            asks = is_open | (begins & (limit >= newest))
            return asks, jnp.where(asks, jnp.clip(limit - newest, 0, drafted), 0)

        tokens, known = jnp.zeros((*newest.shape, width - 1), jnp.int32), jnp.zeros_like(newest)
        if self.forced and self.table is not None:
            tokens, known = find_forced(self.table, rows, state, width - 1)
        asks, drafted = certain, forced = reach(jnp.where(may_draft, known, 0), jnp.full_like(newest, NEVER))
        drafter, trust, probes = old.drafter, old.trust, None
        if self.drafter is not None:
            drafter, draft = self._propose(self.drafter, rows, state, tokens, forced)
            tokens, trust = after_forced(draft.tokens, forced, tokens, known), draft.trust
            before_end = count_before(is_end(tokens, ends_of(rows)), axis=2)
            offered = jnp.maximum(known, jnp.minimum(forced + jnp.clip(draft.count, 0, self.most(rows)), width - 1))
            offered = jnp.minimum(jnp.minimum(offered, rows.time_max - 1 - newest), before_end + 1)
            needed = (certain | rows.find_unfed(state, certain)).sum() + forced.sum()
            if self.probes and draft.probes is not None:
                probes, time = draft.probes, rows.first[:, None] + draft.probes.place
                fits = (probes.place >= 0) & (time < rows.time_max) & (has_room & ~state.done[:, None])[:, :, None]
                probes = dataclasses.replace(probes, live=probes.live & fits)
                needed += probes.live.sum()
            _, useful = reach(jnp.where(may_draft, jnp.maximum(offered, 0), 0), before_end)
            odds = old.record.odds(self.drafter.odds, trust)
            # A row that is queried only because of drafts above it also needs a draft of another row to be correct.
            more = self.choose_lengths(rows, useful - forced, odds, ~certain, needed)
            asks, drafted = reach(forced + more, before_end)
        feeds_end = rows.find_unfed(state, asks)
        fed = jnp.concatenate([state.last[:, None], tokens.swapaxes(1, 2)], axis=1)
        live = (asks[:, None] & (columns[:, None] <= drafted[:, None])) | (feeds_end[:, None] & (columns == 0)[:, None])
        drafts = dataclasses.replace(old, fed=fed, live=live, forced=forced, trust=trust, drafter=drafter)
        queries, kind = [fed, newest[:, None] + columns[:, None], live], None
        if probes is not None and old.probed is not None:
            drafts = dataclasses.replace(drafts, probed=dataclasses.replace(old.probed, fed=probes.live))
            kind = jnp.where(columns[:, None] <= forced[:, None], CERTAIN, DRAFTED)
            kind = jnp.pad(kind, ((0, 0), (0, self.probes), (0, 0)), constant_values=PROBE).reshape(len(fed), -1)
            own = probes.tokens, rows.first[:, None] + probes.place, probes.live
            queries = [jnp.concatenate([x, y.swapaxes(1, 2)], axis=1) for x, y in zip(queries, own, strict=True)]
        state = dataclasses.replace(state, retired=state.retired | feeds_end, drafts=drafts)
        tokens, time, live = (x.reshape(len(x), -1) for x in queries)
        return state, Query(tokens, jnp.tile(index, self.columns(rows))[None], time, live, kind=kind)

    def _propose(
        self, drafter: Drafter, rows: Rows, state: RowState, tokens: Array, forced: Array
    ) -> tuple[Tree, Draft]:
        """Asks the drafter for a draft. The drafter sees the forced tokens that this call feeds as generated tokens.

        Args:
          drafter: the drafter.
          rows: the strategy.
          state: the rows.
          tokens: i32 [B, R, C], forced tokens.
          forced: i32 [B, R], the number of forced tokens that this call feeds.
        """
        assert state.drafts is not None
        old, known, hidden, guessed = state.drafts, state.tokens, state.drafts.hidden, state.drafts.guessed
        if self.forced:
            known, guessed = append_forced(known, state.length, tokens, forced), jnp.where(forced > 0, 0, guessed)
            hidden = None if hidden is None else jnp.where(forced[:, :, None] > 0, 0, hidden)
        length = state.length + forced
        written = Written(known, length, old.guesses, guessed, self.source, old.probed, hidden)
        new, draft = drafter.propose(old.drafter, written, self.most(rows))
        check_draft(drafter, draft, (*state.length.shape, self.most(rows)))
        check_state(drafter, old.drafter, new, method="propose")
        return new, draft

    def advance(self, rows: Rows, state: RowState, answers: Array | tuple[Array, Array]) -> RowState:
        """Appends the tokens that are accepted (lines 9-13 of Algorithm 1).

        Args:
          rows: the strategy.
          state: the state after `query`.
          answers: i32 [B, (1 + C + P) * R], the tokens that the model generated; if the drafter wants "hidden", a pair
            of them and the outputs of the decoder [B, (1 + C + P) * R, W].
        """
        assert state.drafts is not None
        old, width, started = state.drafts, self.width(rows), rows.has_started(state)
        columns = jnp.arange(width)
        answers, outputs = answers if isinstance(answers, tuple) else (answers, None)
        of_rows, probed = width * rows.rows, old.probed
        if probed is not None:
            probed = _with_answers(probed, answers[:, of_rows:], None if outputs is None else outputs[:, of_rows:])
        live, answers = old.live, answers[:, :of_rows].reshape(old.live.shape)
        verdict = verify(rows, state, answers)
        place = jnp.arange(rows.time_max) - state.length[:, :, None]
        found = jnp.take_along_axis(answers.swapaxes(1, 2), jnp.clip(place, 0, width - 1), axis=2)
        written = jnp.where(place >= 0, found, state.tokens)
        if rows.separator is not None:
            repeated = repeated_parts.find_end(written, state.length, state.length + verdict.gain, rows.separator)
            gain = jnp.minimum(verdict.gain, repeated - state.length)
            verdict = verdict._replace(gain=gain, ends=verdict.ends | (repeated < NEVER))
        # These values are computed as if every row with queries had begun; `begins` then determines which rows did.
        ended, length, circle = state.ended | verdict.ends, state.length + verdict.gain, state.circle
        if circle is not None:
            # Rows that do not begin are compared, too. This changes no answer: these rows could only add a later time.
            circle = jnp.minimum(circle, rows.find_circle(written, length, ended, verdict.ends))
        begins = started | ((verdict.gain > 0) & rows.may_begin(ended, length, circle))
        gain, ends = jnp.where(begins, verdict.gain, 0), verdict.ends & begins
        ended, length = state.ended | ends, state.length + gain

        counts = jnp.where(begins & verdict.asks, jnp.minimum(verdict.run, verdict.limit), -1)  # last accepted column
        kept = live & ((columns[:, None] <= counts[:, None]) | state.ended[:, None])
        tokens = jnp.where((place >= 0) & (place < gain[:, :, None]), found, state.tokens)
        at_end = jnp.clip(length - 1, 0, rows.time_max - 1)[:, :, None]
        last = jnp.where(length > 0, jnp.take_along_axis(tokens, at_end, axis=2)[:, :, 0], rows.bos)
        beyond = jnp.clip(gain[:, :, None] + jnp.arange(self.most(rows)), 0, width - 1)
        hidden = old.hidden
        if hidden is not None and outputs is not None:
            outputs = outputs[:, :of_rows].reshape(*live.shape, -1).swapaxes(1, 2)  # [B, R, 1 + C, W]
            newest = jnp.take_along_axis(outputs, jnp.maximum(gain - 1, 0)[:, :, None, None], axis=2)[:, :, 0]
            hidden = jnp.where(gain[:, :, None] > 0, newest.astype(hidden.dtype), hidden)
        fed = live.sum(axis=1)
        taken = count_slots(*(x.reshape(len(x), -1) for x in (live, kept)))
        drafts = dataclasses.replace(
            old,
            calls=old.calls + ~state.done,
            used=old.used + jnp.where(state.done, 0, taken if old.apart else taken.max()),
            kept=jnp.pad(kept, ((0, 0), (0, self.probes), (0, 0))),
            probed=probed,
            record=old.record.add(
                old.trust, drafted=fed - 1 - old.forced, run=verdict.run - old.forced, counts=counts - old.forced
            ),
            guesses=jnp.take_along_axis(answers.swapaxes(1, 2), beyond, axis=2),
            guessed=jnp.where(verdict.asks, jnp.clip(fed - gain, 0, self.most(rows)), 0),
            hidden=hidden,
            trace=old.trace
            and tracing.record(
                old.trace,
                jnp.where(state.done, rows.time_max, old.calls),
                drafted=old.fed[:, 1:].swapaxes(1, 2),
                count=jnp.where(verdict.asks, fed - 1, -1),
                accepted=jnp.clip(counts, 0, gain),
                written=gain,
            ),
        )
        state = dataclasses.replace(
            state,
            tokens=tokens,
            length=length,
            last=last,
            ended=ended,
            retired=state.retired | (ends & (counts >= gain)),
            started=state.started + (begins & ~started).sum(axis=1),
            circle=circle,
            drafts=drafts,
        )
        return rows.settle(state)

    def _no_probes(self, batch: int, rows: int) -> Probed | None:
        """Returns the `Probed` before the first call, with no fed probe; None if the drafter has no probes."""
        if not self.probes:
            return None
        none, hidden = jnp.zeros((batch, rows, self.probes), jnp.int32), self._no_hidden(batch, rows)
        if hidden is not None:
            hidden = jnp.zeros((*none.shape, hidden.shape[2]), hidden.dtype)
        return Probed(none > 0, none, hidden)

    def _no_hidden(self, batch: int, rows: int) -> Array | None:
        """Returns zeros [B, R, W] for `DraftState.hidden`; None if the drafter does not want the decoder's outputs."""
        if not wants(self.drafter, "hidden"):
            return None
        assert self.source and self.source.width, "`bind_source` gets the width of the decoder"
        return jnp.zeros((batch, rows, self.source.width))

    def choose_lengths(self, rows: Rows, count: Array, odds: Array, hangs: Array, needed: Array) -> Array:
        """Returns the numbers of tokens to draft, at the costs of these calls; see `draft_lengths.choose_lengths`."""
        width = self.width(rows)
        most = len(count) * rows.rows * self.columns(rows)
        sizes = (*(n for n in self.query_counts if n < most), most) if self.rounded else None
        return choose_lengths(count, odds, hangs, needed, fixed=self.fixed, most=width - 1, sizes=sizes)

    def _has_room(self, rows: Rows, drafts: DraftState) -> Array:
        """Returns bool [B], whether the slots suffice for this call with drafts.

        After this call, there must be room for one call without drafts for each later time-step.
        """
        later = rows.rows * (rows.time_max - drafts.calls - 1)
        return drafts.used + rows.rows * self.columns(rows) + later <= self.slots(rows)


def _with_answers(probed: Probed, answers: Array, outputs: Array | None) -> Probed:
    """Returns the probes of a call with the tokens i32 [B, P * R] and the outputs [B, P * R, W] of the model."""
    batch, rows, count = probed.fed.shape
    tokens, hidden = answers.reshape(batch, count, rows).swapaxes(1, 2), probed.hidden
    if hidden is not None and outputs is not None:
        hidden = outputs.reshape(batch, count, rows, -1).swapaxes(1, 2).astype(hidden.dtype)
    return Probed(probed.fed, tokens, hidden)


def verify(rows: Rows, state: RowState, answers: Array) -> Verdict:
    """Compares the drafts of the last call with the tokens of the model, by the rule of this module's docstring.

    Args:
      rows: the strategy.
      state: the state after `Drafts.query`.
      answers: i32 [B, 1 + C, R], the tokens that the model generated from the columns.
    """
    assert state.drafts is not None
    live, columns = state.drafts.live, jnp.arange(state.drafts.live.shape[1])
    newest = rows.first + state.length
    asks, drafts = live[:, 0] & ~state.ended, state.drafts.fed[:, 1:]
    run = count_before(~(live[:, 1:] & (drafts == answers[:, :-1])), axis=1)
    right = columns[:-1, None] < run[:, None]
    # The time up to which a row's tokens are fed and correct. NEVER for a row with a correct end token among its
    # drafts: such a row does not limit the rows below it.
    far = jnp.where((right & is_end(drafts, ends_of(rows))).any(axis=1), NEVER, newest + run)
    far = jnp.where(asks, far, jnp.where(rows.has_started(state), NEVER, -1))
    limit = rows.least_above(far) - newest
    gain = jnp.where(asks, jnp.maximum(jnp.minimum(run, limit) + 1, 0), 0)
    ends_here = is_end(answers, ends_of(rows)) & (columns[:, None] < gain[:, None])
    return Verdict(asks, run, limit, jnp.minimum(gain, count_before(ends_here, axis=1) + 1), ends_here.any(axis=1))
