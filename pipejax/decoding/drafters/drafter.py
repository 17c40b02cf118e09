"""The interface of drafters: the rows that a drafter is given, and the drafts that it returns.

Shapes: B batch, L source length, R rows of the grid, T the most tokens of a row, D the most drafted tokens of a row in
a call, P the probe columns of a row, W the width of the model.
"""

import dataclasses
from typing import Any, Protocol

import flax.struct

from pipejax import moved
from pipejax.config import Config
from pipejax.decoding.rows import Rows
from pipejax.decoding.strategy import Array, SourceIds
from pipejax.system import Tree

WANTS = ("parameters", "encoded", "hidden")  # the elements of `Drafter.wants`


@flax.struct.dataclass
class Probed:
    """The probe columns of the last call."""

    fed: Array  # bool [B, R, P], whether the call fed the column
    tokens: Array  # i32 [B, R, P], the tokens generated from the columns, with rules and forced tokens
    hidden: Array | None  # [B, R, P, W], the outputs of the decoder; None: the drafter does not want "hidden"


@flax.struct.dataclass
class Written:
    """The tokens of the rows that are generated so far, and the sources of the batch.

    Forced tokens, such as row names, that the call feeds in any case count as generated.
    """

    tokens: Array  # i32 [B, R, T], the tokens of each row, without bos, with its end token; 0 beyond `length`
    length: Array  # i32 [B, R], number of tokens
    guesses: Array  # i32 [B, R, D], the model's tokens of the previous call for the places from `length` on
    guessed: Array  # i32 [B, R], number of guesses; the model generated them from rejected tokens, so they may be wrong
    source: SourceIds | None = None  # the sources, as in `Drafter.init`
    probed: Probed | None = None  # None: the drafter has no probes
    hidden: Array | None = None  # [B, R, W], the output of the decoder that gave each row's newest token; 0: none


@flax.struct.dataclass
class Probes:
    """Probe columns, or probes: tokens that a call feeds in addition to the rows. They are never part of the answer.

    A probe sees the accepted tokens up to its own row and time, and other probes, but no drafted token. Columns other
    than probes do not see it. Its cache slot is freed after the call, and the generated token is in `Written.probed` of
    the next call.
    """

    tokens: Array  # i32 [B, R, P]
    place: Array  # i32 [B, R, P], the place of the column in its row: 0 is bos, j from 1 on is the j-th token
    live: Array  # bool [B, R, P], whether to feed the column, also in a row that has not begun


@flax.struct.dataclass
class Draft:
    """The drafted next tokens of each row. Drafts for rows that have ended or cannot begin are ignored."""

    tokens: Array  # i32 [B, R, D]; an end token may be drafted too, and ends the draft
    count: Array  # i32 [B, R], number of drafted tokens
    trust: Array  # i32 [B, R], index into `odds`
    probes: Probes | None = None  # needed if the drafter has the member `probes`


@moved.attributes(queries="query_counts")
@dataclasses.dataclass(frozen=True)
class Setting:
    """The decode in which a drafter takes part. Static under jit."""

    rows: Rows  # the strategy that verifies the drafts
    most: int  # D
    query_counts: tuple[int, ...]  # the sizes of a batch's calls, as in `Drafts`


@dataclasses.dataclass(frozen=True)
class TargetModel:
    """The model for which a drafter drafts, an argument of `Drafter.load`."""

    config: Config
    fingerprint: str = ""  # the fingerprint of the parameters, `params_fp` of the checkpoint; "": unknown
    auxiliary: Tree = None  # the auxiliary parameters of the checkpoint; None: there are none
    encoder_fingerprint: str = ""  # `checkpoint.fingerprint.encoder_digest` of the parameters; "": unknown


class Drafter(Protocol):
    """Guesses the next tokens of rows. A drafter is a frozen dataclass, static under jit; its state has fixed shapes.

    The state is a pytree of arrays whose first axis is B. A drafter may also have the following members:

    - `wants`, a set of elements of `WANTS`. With "encoded", `SourceIds.encoded` has the output of the encoder, in the
      dtype of the computation. With "hidden", `Written.hidden` has outputs of the decoder. With "parameters",
      `SourceIds.parameters` has the result of `load`.
    - `load(directory, target)`, needed with "parameters", and called once when a checkpoint is opened: returns a tree
      of arrays. `directory` is the value of `decode.draft_checkpoint`, and `target` a `TargetModel`.
    - `read(source)`, traced, and called once for each batch of sources after the encoder: returns a tree of arrays
      with B as the first axis, `SourceIds.memory` in the other methods. `SourceIds.encoded` is then given to `read`
      alone.
    - `widen(source, slots)`, traced, and called after `read` and when a source joins longer ones: returns
      `SourceIds.memory` padded to `slots` tokens. Needed if the shape of the result of `read` depends on L.
    - `probes`, P: the number of probe columns of a row in a call, see `Probes`. Each call feeds them, unless the cache
      is nearly full.
    - `loops`, True if `propose` computes a loop over a cache. The state may then have arrays with another first axis,
      which are not reset when an example of a running batch begins.
    """

    @property
    def odds(self) -> tuple[float, ...]:
        """The prior probability, for each degree of trust, that a drafted token is correct."""

    def init(self, source: SourceIds, rows: int) -> Tree:
        """Returns the state before the first call, for a grid of `rows` rows. `source` has ids [B, L]."""

    def propose(self, state: Any, written: Written, most: int) -> tuple[Tree, Draft]:
        """Returns the new state, and a draft of at most D = `most` tokens for every row; traced."""
