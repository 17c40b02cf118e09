"""Checks the training layout of a method: decodes with the target's tokens, and compares what each slot sees."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from pipejax import methods
from pipejax.decoding import TRUNCATIONS, Decoded, Strategy, ends_of, strategy_checks
from pipejax.inference import decoding_options
from pipejax.inference.sources import Source
from pipejax.methods import Ids, Method, Target
from pipejax.system import Tree
from pipejax.testing.recomputation import Cell, History, follow
from pipejax.testing.scripted import chosen

FIRST_WORD = 10  # an id of the tokenizer from which on ids are words, not special tokens or separators
Key = Any  # the key of a slot: its row and time, or the context of a query with a lineage


@dataclasses.dataclass(frozen=True)
class Layout:
    """A target laid out for training, and the answer that decoding gives if each slot generates its target token."""

    method: Method
    strategy: Strategy
    rows: tuple[str, ...]
    ids: Ids
    words: Any  # the tokenizer
    vocabulary: int
    most: int  # the most tokens of the target
    where: str  # the name of the target, for messages

    @cached_property
    def target(self) -> Target:
        """The target, after the checks of training."""
        target = self.method.target([*self.rows], self.words, self.ids, most=self.most, where=self.where)
        methods.check_target(target, self.method, vocabulary=self.vocabulary, most=self.most, where=self.where)
        return target

    @cached_property
    def learned(self) -> History:
        """The slots of the target."""
        flat = self.target.flat
        cells = [*zip(flat.row.tolist(), flat.time.tolist(), flat.inputs.tolist(), strict=True)]
        return History(self.strategy, cells, [True] * len(cells), [None] * len(cells))

    @cached_property
    def has_weight(self) -> list[bool]:
        """Whether each slot of the target counts in the loss."""
        weights = self.target.flat.weights
        return (weights.reshape(len(weights), -1).max(axis=1) > 0).tolist()

    @cached_property
    def rights(self) -> list[list[int]]:
        """The target tokens of each slot: those with a weight, or the first one if none has a weight."""
        flat = self.target.flat
        pairs = zip(flat.targets.reshape(len(flat.inputs), -1), flat.weights.reshape(len(flat.inputs), -1), strict=True)
        return [targets[weights > 0].tolist() or [int(targets[0])] for targets, weights in pairs]

    @cached_property
    def forced(self) -> np.ndarray | None:
        """i32 [R, W], the tokens that decoding forces, such as row names, -1 elsewhere; None: no token is forced."""
        known = decoding_options.row_prefix_ids(Source(self.where, ()), self.method, self.words, self.ids.ends)
        return decoding_options.forced_of(known, self.strategy)

    def is_forced(self, cell: Cell) -> bool:
        """Returns whether decoding forces the token that is generated at a slot."""
        return self.forced is not None and bool(self.forced[cell[0], cell[1]] >= 0)

    @cached_property
    def has_lineages(self) -> bool:
        """Whether queries have lineages, so that slots are identified by what they see, not by row and time."""
        if self.strategy.reads_source:
            return False
        return jax.eval_shape(lambda: self.strategy.query(self.strategy.init(1))[1]).lineage is not None

    def key(self, history: History, slot: int) -> Key:
        """Returns the key of a slot. A slot of training and a slot of decoding correspond if their keys are equal."""
        return history.context(slot) if self.has_lineages else history.cells[slot][:2]

    @cached_property
    def keys(self) -> list[Key]:
        """The key of each slot of the target."""
        return [self.key(self.learned, slot) for slot in range(len(self.learned.cells))]

    @cached_property
    def right_of(self) -> dict[Key, list[int]]:
        """The target tokens of each slot, by its key; slots with a weight take precedence."""
        found = dict[Key, list[int]]()
        for weighs in (False, True):
            pairs = zip(self.keys, self.rights, self.has_weight, strict=True)
            found |= {key: right for key, right, has_weight in pairs if has_weight == weighs}
        return found

    def is_written(self, key: Key, last: int) -> bool:
        """Returns whether a slot is part of an answer.

        A slot without a lineage is part of the answer if its row is at most `last`. A slot with a lineage is part of
        the answer if it is the first slot, or if its token is a target token of the slot before it.
        """
        if not self.has_lineages:
            return bool(key[0] <= last)
        before = tuple(sorted((distance - 1, token) for distance, token in key if distance))
        return not before or any(distance == 0 and token in self.right_of.get(before, ()) for distance, token in key)

    def decode(self, changed: Key = None) -> tuple[History, Decoded, dict[Key, set[Any]]]:
        """Decodes with the target tokens as the model's answers; a slot without a target token generates the end token.

        Args:
          changed: the key of a slot that generates another token instead; None: none.

        Returns:
          The filled slots; the result; and for each key, the cells that the slot saw when it was fed.
        """
        saw = dict[Key, set[Any]]()

        def answer(history: History, new: Sequence[int]) -> Tree:
            found = []
            for slot, seen in zip(new, history.seen_by(new), strict=True):
                key, cell = self.key(history, slot), history.cells[slot]
                saw[key] = {history.cells[i] for i in np.flatnonzero(seen)}
                right = self.right_of.get(key, [self.strategy.eos])
                if self.forced is not None and self.is_forced(cell):
                    right = [int(self.forced[cell[:2]])]
                other = next(
                    token for token in range(FIRST_WORD, self.vocabulary) if token not in (*right, *self.ids.ends)
                )
                found.append([other] if key == changed else right)
            return chosen(self.strategy, found, self.vocabulary)

        history, decoded, _ = follow(self.strategy, answer)
        return history, decoded, saw

    @cached_property
    def course(self) -> tuple[History, Decoded, dict[Key, set[Any]]]:
        """The result of `decode` without a change."""
        return self.decode()

    @property
    def truncated(self) -> str | None:
        """The limit that truncated the answer."""
        return TRUNCATIONS[int(self.course[1].truncated[0])]

    @property
    def is_whole(self) -> bool:
        """Whether neither the layout nor the answer was cut."""
        return not self.target.was_cut and self.truncated is None

    @property
    def fills_grid(self) -> bool:
        """Whether the answer has all rows of the target, but ends because no more rows fit into the grid."""
        has_room = len(self.rows) <= self.strategy.places[0]
        return not self.target.was_cut and self.truncated == "sub_max" and has_room

    @property
    def read(self) -> list[str]:
        """The rows that `Method.read` returns for the answer."""
        return self.read_of(self.course[1])

    def read_of(self, decoded: Decoded) -> list[str]:
        """Returns the rows that `Method.read` returns for a decoded example."""
        tokens, lengths = decoded.tokens[0], decoded.lengths[0].tolist()
        texts = [self.words.decode(tokens[row, : lengths[row]]) for row in self.method.order(lengths)]
        return self.method.read(texts, " ; ")[1]


def check_places(layout: Layout) -> None:
    """Raises a UserError if two slots of a layout have the same place."""
    cells = layout.learned.cells
    if len({cell[:2] for cell in cells}) < len(cells):
        strategy_checks.refuse(layout.method, f"target: {layout.where}", "two slots at the same row and time", "one")


def check_cut_ends(cut: Layout, whole: Layout) -> None:
    """Raises a UserError if a cut layout teaches an end where the target goes on.

    Slots of the two layouts correspond if they see the same tokens at the same distances.

    Args:
      cut: the layout of a target with fewer tokens.
      whole: the layout of the same target without a cut.
    """
    ends, after = {*ends_of(cut.strategy)}, dict[Key, set[int]]()
    for slot, right in enumerate(whole.rights):
        after.setdefault(whole.learned.context(slot), set()).update(right)
    for slot, cell in enumerate(cut.learned.cells):
        there = after.get(cut.learned.context(slot), ends)
        if cut.has_weight[slot] and not ends.isdisjoint(cut.rights[slot]) and ends.isdisjoint(there):
            place = f"target: {cut.where}: row {cell[0]}, time {cell[1]}, with at most {cut.most} tokens"
            expected = f"weight 0, or {sorted(there)} as in the whole target"
            strategy_checks.refuse(cut.method, place, "an end token with a weight", expected)


def check_truncated(layout: Layout) -> None:
    """Raises a UserError if an answer is truncated although all tokens of the target and all ends were decoded."""
    saw, weighs = layout.course[2], zip(layout.keys, layout.has_weight, strict=True)
    is_decoded = all(key in saw for key, has_weight in weighs if has_weight)
    has_room = not layout.strategy.places[0] or len(layout.rows) < layout.strategy.places[0]
    if not layout.target.was_cut and is_decoded and has_room and layout.truncated is not None:
        found = f"{layout.truncated} for {layout.where}, although all of its tokens were decoded"
        strategy_checks.refuse(layout.strategy, "result: truncated", found, "None")


def check_seen(layout: Layout) -> None:
    """Raises a UserError if a slot with a weight sees other tokens in training than in decoding."""
    saw, cells = layout.course[2], layout.learned.cells
    for slot, (key, cell) in enumerate(zip(layout.keys, cells, strict=True)):
        if not layout.has_weight[slot] or not (layout.is_whole or key in saw):
            continue
        sees = {cells[i] for i in np.flatnonzero(layout.learned.seen_by([slot])[0])}
        place = f"target: {layout.where}: the slot at row {cell[0]}, time {cell[1]}"
        if layout.has_lineages and key not in saw:
            strategy_checks.refuse(
                layout.method, place, f"(distance, token) {[*key]} only in training", "the same in decoding"
            )
        if not layout.has_lineages and sees != (there := saw.get(key, set())):
            found = (
                f"(row, time, token) {sorted(sees - there)} only in training, {sorted(there - sees)} only in decoding"
            )
            strategy_checks.refuse(layout.method, place, found, "the same visible tokens in both")


def check_rows(layout: Layout) -> None:
    """Raises a UserError if decoding the tokens of a target that was not cut gives other rows than the target's.

    The rows of a strategy whose queries have lineages, such as branches, are compared as a set.
    """
    is_same = {*layout.read} == {*layout.rows} if layout.has_lineages else layout.read == [*layout.rows]
    if (layout.is_whole or layout.fills_grid) and not is_same:
        strategy_checks.refuse(
            layout.method, f"read: {layout.where}", layout.read, f"{[*layout.rows]}, the rows of the target"
        )


def check_learned(layout: Layout) -> None:
    """Raises a UserError if a token that determines the answer has no weight in training and is not forced in decoding.

    A token determines the answer if decoding again with another token in its place gives another answer. The rows after
    the last row with tokens are empty; only the first of them must be learned, since it ends the answer.
    """
    if not layout.is_whole:
        return
    history, decoded, _ = layout.course
    last = int(np.flatnonzero(decoded.lengths[0]).max(initial=-1)) + 1
    counts = {key for key, has_weight in zip(layout.keys, layout.has_weight, strict=True) if has_weight}
    for slot, cell in enumerate(history.cells):
        key = layout.key(history, slot)
        if key in counts or layout.is_forced(cell) or not layout.is_written(key, last):
            continue
        other = layout.read_of(layout.decode(changed=key)[1])
        if other != layout.read:
            there = "a slot with weight 0" if key in layout.right_of else "no slot"
            place = f"target: {layout.where}: row {cell[0]}, time {cell[1]}"
            strategy_checks.refuse(
                layout.method, place, f"{there} for a token that determines the answer", "a slot with a weight above 0"
            )
