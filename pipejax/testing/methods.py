"""Checks custom methods by the rules of a table."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np

from pipejax import methods
from pipejax.config import Config, DataConfig, DecodeConfig
from pipejax.data import make_task
from pipejax.decoding import Strategy, ends_of, strategy_checks
from pipejax.decoding.strategy_checks import refuse
from pipejax.inference.generator import Generator
from pipejax.methods import ABILITIES, Ids, Method, RowPrefixes, spell
from pipejax.model.backbone import Backbone
from pipejax.system import Tree
from pipejax.system.errors import UserError
from pipejax.testing import layouts, losses, scripted
from pipejax.testing.answers import Records, compare_records, stream
from pipejax.testing.layouts import Layout
from pipejax.testing.recomputation import SHORT, TOY, draw_ids, random_params
from pipejax.testing.requirements import Requirement, check_all

MOST, FEW = 64, 8  # the most tokens of a target, and of a target that is cut
SIZES = (1, 2, 3, 1, 4, 2, 3, 5)  # numbers of rows of the default targets
# The fields of sources that test the abilities "prefix" and "rows".
PREFIXED: dict[str, dict[str, Any]] = {
    "prefix": {"row_prefixes": [[3]]},
    "rows": {"row_prefixes": [[3], [4]], "max_rows": 2},
}


@dataclasses.dataclass(frozen=True)
class MethodCase:
    """A method that is checked, on a toy model."""

    method: Method
    model: Backbone = TOY
    targets: Sequence[Sequence[str]] = ()  # the rows of targets; (): random ones
    sources: int = 8  # the number of random sources

    @cached_property
    def ids(self) -> Ids:
        """The special ids of the model."""
        return Ids.of(self.model)

    @cached_property
    def words(self) -> Any:
        """The tokenizer of the demo task."""
        return make_task(DataConfig(task="demo")).tokenizer()

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy, after the checks of its interface."""
        self.method.check()
        return methods.strategy_of(self.method, self.ids)

    @cached_property
    def layouts(self) -> list[Layout]:
        """The layouts of the targets."""
        rng = np.random.default_rng(0)
        most = self.strategy.places[0]
        sizes = (*SIZES, *([most] if most <= max(SIZES) else []))
        texts = self.targets or [[self.words.decode(draw_ids(rng, self.model, 4)) for _ in range(n)] for n in sizes]
        return [self.layout(rows, f"target {i}") for i, rows in enumerate(texts)]

    def layout(self, rows: Sequence[str], where: str, most: int = MOST) -> Layout:
        """Returns the layout of a target of at most `most` tokens."""
        return Layout(self.method, self.strategy, tuple(rows), self.ids, self.words, self.model.vocab_size, most, where)

    @cached_property
    def slots(self) -> losses.Slots:
        """Random arguments of the loss."""
        return losses.random_slots(self.method, self.model.vocab_size)

    @cached_property
    def losses(self) -> losses.Losses:
        """The losses of the random arguments that are compared."""
        return losses.measure(self.method, self.slots)

    @cached_property
    def params(self) -> Tree:
        """Random parameters."""
        return random_params(self.model, self.strategy.eos)

    @cached_property
    def generator(self) -> Generator:
        """A generator with the random parameters. It returns scores if the method has the ability "score"."""
        decode = DecodeConfig(scores="score" in self.method.can)
        return Generator(Config(model=self.model, method=self.method, decode=decode), self.params, self.words)

    @cached_property
    def records(self) -> list[Any]:
        """Random sources of mixed lengths, then sources with prefixes if the method supports prefixes."""
        rng = np.random.default_rng(1)
        plain = [{"source_ids": [*draw_ids(rng, self.model, SHORT - 1), self.ids.eos]} for _ in range(self.sources)]
        return plain + [
            record | PREFIXED[key]
            for key in PREFIXED
            if key in self.method.can
            for record in plain[: min(3, self.sources)]
        ]

    @cached_property
    def compared(self) -> tuple[int, str]:
        """The number of answers that equal their recomputation, and the names of the compared decoders."""
        generator, can, method = self.generator, self.method.can, self.method
        checked = [generator.source(record, f"source {i}", i) for i, record in enumerate(self.records)]
        runs = {"decode": generator.decode(self.records, batch_size=4)}
        if "draft" in can:
            runs["drafts"] = generator.decode(self.records, batch_size=1, draft="source", draft_tokens=2)
        if {"stream", "serve"} & can:
            runs["stream"] = stream(generator, method, checked[: self.sources])
        count = compare_records(self.model, self.params, method, checked, cast(Records, runs), method)
        return count, ", ".join(runs)


def check_method(
    method: Method, *, model: Backbone = TOY, targets: Sequence[Sequence[str]] = (), sources: int = 8
) -> str:
    """Checks a method on a toy model by the rules of METHOD_REQUIREMENTS, which docs/methods.md lists.

    Args:
      method: the method. It should have few rows and times, as each step is recomputed.
      model: the backbone, if the method needs another one than the toy.
      targets: the rows of targets, if the method does not accept the default ones.
      sources: the number of random sources to decode.

    Returns:
      A line that summarises the number of compared layouts and answers.

    Raises:
      UserError: the method breaks a rule. The message names the part, the result, the expected result and the rule.
    """
    case = MethodCase(method, model, targets, sources)
    check_all(METHOD_REQUIREMENTS, case)
    whole, (compared, runs) = sum(layout.is_whole for layout in case.layouts), case.compared
    return f"{type(method).__name__}: {whole} layouts and {compared} answers agree with recomputation ({runs})"


def _check_interface(case: MethodCase) -> None:
    """Requires the properties that `Strategy` and the abilities of the method need."""
    assert case.strategy


def _check_accounting(case: MethodCase) -> None:
    """See `scripted.check_accounting`."""
    is_ordered = any(ABILITIES[ability].by_place for ability in case.method.can)
    scripted.check_accounting(case.strategy, case.model.vocab_size, is_ordered=is_ordered)


def _check_stop(case: MethodCase) -> None:
    """Stops the first example of a batch, if the method can stream or serve; see `scripted.check_batches`."""
    if {"stream", "serve"} & case.method.can:
        scripted.check_batches(case.strategy, case.model.vocab_size, stops=[0])


def _check_stable(case: MethodCase) -> None:
    """Requires the same layouts if all targets are laid out again, in another order."""
    first = [layout.target for layout in case.layouts]
    for layout, target in reversed([*zip(case.layouts, first, strict=True)]):
        again, rows = case.layout(layout.rows, layout.where).target, layout.rows
        for part, here, there in zip(target.flat._fields, again.flat, target.flat, strict=True):
            if not np.array_equal(here, there):
                place = f"target: {layout.where}: {part}"
                refuse(case.method, place, f"{here.tolist()} the second time", f"{there.tolist()}, as the first time")
        if again.was_cut != target.was_cut:
            refuse(case.method, f"target: {layout.where}: was_cut", again.was_cut, f"{target.was_cut} for {[*rows]}")


def _check_learned_settings(case: MethodCase) -> None:
    """Requires that `learned` has each number or flag among the method's fields that changes the layout of a target.

    Cut targets are left out, since settings that only limit answers may cut them elsewhere. Values that the class does
    not accept are left out, too.
    """
    for field in dataclasses.fields(case.method):
        value = getattr(case.method, field.name)
        if not isinstance(value, int | float) or f"method.{field.name}" in case.method.learned():
            continue
        changed = {field.name: not value if isinstance(value, bool) else value + 1}
        try:
            other = dataclasses.replace(case.method, **changed)
        except Exception:  # a class of a user refuses values by errors of any type
            continue
        for layout in case.layouts:
            try:
                target = dataclasses.replace(layout, method=other).target
            except UserError:  # the method cannot have this value
                break
            is_same = all(map(np.array_equal, target.flat, layout.target.flat))
            if not (is_same or target.was_cut or layout.target.was_cut):
                found = f"no {field.name}, on which the layout of {layout.where} depends"
                refuse(case.method, "learned", found, f"method.{field.name}")


def _check_blank_rows(case: MethodCase) -> None:
    """Adds a row without tokens to targets with fewer rows than the grid; see the rule "blank rows"."""
    room = np.inf if case.method.parts_text else case.strategy.places[0] or np.inf
    for layout in (layout for layout in case.layouts if len(layout.rows) < room):
        other = case.layout((*layout.rows[:1], " ", *layout.rows[1:]), f"{layout.where} with a blank row")
        try:
            is_same = not (other.is_whole and layout.is_whole) or sorted(other.read) == sorted(layout.read)
        except UserError:  # such as a method with a fixed number of rows
            continue
        if not is_same:
            refuse(case.method, f"target: {other.where}", f"{other.read} by decoding", f"{layout.read}")


def _check_cuts(case: MethodCase) -> None:
    """Requires `was_cut` if the layout of a target changes when it is limited to few tokens."""
    for layout in case.layouts:
        cut = case.layout(layout.rows, layout.where, FEW).target
        is_same = all(map(np.array_equal, cut.flat, layout.target.flat))
        if not is_same and not cut.was_cut:
            refuse(
                case.method,
                f"target: {layout.where}: was_cut",
                f"False with at most {FEW} tokens",
                f"True, since the full layout of {len(layout.target.flat.inputs)} slots differs",
            )


def _check_cut_ends(case: MethodCase) -> None:
    """See `layouts.check_cut_ends`. The default targets and one with a row of more than `FEW` tokens are cut."""
    long = case.words.decode(draw_ids(np.random.default_rng(2), case.model, FEW + 2, FEW + 2))
    for layout in [*case.layouts, *([] if case.targets else [case.layout([long], "a target with a long row")])]:
        if not layout.target.was_cut:
            layouts.check_cut_ends(case.layout(layout.rows, layout.where, FEW), layout)


def _check_truncated(case: MethodCase) -> None:
    """See `layouts.check_truncated`."""
    for layout in case.layouts:
        layouts.check_truncated(layout)


def _check_layouts(case: MethodCase) -> None:
    """See `layouts.check_places` and `layouts.check_seen`. At least one target must be decoded whole."""
    for layout in case.layouts:
        layouts.check_places(layout)
        layouts.check_seen(layout)
    if not any(layout.is_whole for layout in case.layouts):
        refuse(case.method, "target", f"only cut targets ({len(case.layouts)})", "a target that is not cut")


def _check_other_ids(case: MethodCase) -> None:
    """Repeats `layouts.check_seen` and `layouts.check_rows` with other ids of bos and of the end tokens."""
    whole = [layout for layout in case.layouts if layout.is_whole]
    used = {token for layout in whole for token in layout.target.flat.inputs.tolist()}
    used |= {case.ids.bos, *case.ids.ends, case.strategy.eos}
    free = [token for token in range(layouts.FIRST_WORD, case.model.vocab_size) if token not in used][::-1]
    if len(free) < 2:
        return
    ids = Ids(bos=free[0], eos=free[1])
    strategy = methods.strategy_of(case.method, ids)
    for layout in whole:
        other = dataclasses.replace(layout, ids=ids, strategy=strategy, where=f"{layout.where}, with {ids}")
        if not other.is_whole:
            refuse(strategy, f"result: truncated: {other.where}", other.truncated, f"None, as with {case.ids}")
        layouts.check_seen(other)
        layouts.check_rows(other)


def _check_read(case: MethodCase) -> None:
    """Compares the rows that are read with the rows of targets, and counts the rows that `read` returns."""
    for layout in case.layouts:
        layouts.check_rows(layout)
    if case.method.parts_text:
        return
    texts = ["red apples", "bread", "old lamps", "tiny white bells", "bread", "maps", "coins", "blue shoes"]
    for count in range(1, min(case.strategy.places[0] or len(texts), len(texts)) + 1):
        text, rows = case.method.read(texts[:count], " ; ")
        if len(rows) != count or any(row not in text for row in texts[:count]):
            refuse(case.method, "read", f"{text!r} and {rows}", f"all of {texts[:count]}")


def _check_learned(case: MethodCase) -> None:
    """See `layouts.check_learned`."""
    for layout in case.layouts:
        layouts.check_learned(layout)


def _check_prefixes(case: MethodCase) -> None:
    """Requires that `add_prefixes` keeps the prefixes and the number of rows of a source."""
    for ability, most in (("prefix", None), ("rows", 2)):
        if ability not in case.method.can:
            continue
        prefixes = tuple(map(tuple, PREFIXED[ability]["row_prefixes"]))
        found = case.method.add_prefixes(RowPrefixes(prefixes, most, "row_prefixes"))
        if tuple(map(tuple, found.prefixes[: len(prefixes)])) != prefixes:
            refuse(
                case.method,
                "add_prefixes: prefixes",
                found.prefixes,
                f"{prefixes}, the prefixes of the source, first",
            )
        if most is not None and found.most != most:
            refuse(case.method, "add_prefixes: most", found.most, f"{most}, the max_rows of the source")


def _check_allowed(case: MethodCase) -> None:
    """Requires that `extra_allowed_ids` has all tokens of targets that are not tokens of their rows."""
    if "limit" not in case.method.can:
        return
    allowed = {*case.method.extra_allowed_ids(case.words), *ends_of(case.strategy)}
    for layout in case.layouts:
        own = {token for row in spell(layout.rows, case.words, case.ids.ends) for token in row}
        asked = {
            token for right, counts in zip(layout.rights, layout.has_weight, strict=True) if counts for token in right
        }
        if lost := sorted(asked - own - allowed):
            found = f"{sorted(allowed)}, without {lost} of {layout.where}"
            refuse(case.method, "extra_allowed_ids", found, "all tokens of targets that are not in their rows")


def _check_rows_of(case: MethodCase) -> None:
    """Requires that the tokens that `rows_of` assigns to a row begin with the row."""
    if "probe" not in case.method.can:
        return
    for layout in (layout for layout in case.layouts if not layout.target.was_cut):
        flat = layout.target.flat
        owners: Any = case.method.rows_of(flat, layout.rows, case.words, case.ids)
        strategy_checks.expect(case.method, f"rows_of: {layout.where}", owners, "int32", flat.inputs.shape)
        for row, expected in enumerate(spell(layout.rows, case.words, case.ids.ends)):
            tokens = flat.targets[owners == row].tolist()
            if tokens[: len(expected)] != expected:
                refuse(case.method, f"rows_of: {layout.where}: row {row}", tokens, f"{expected} first, as in the row")


METHOD_REQUIREMENTS: tuple[Requirement[MethodCase], ...] = (
    Requirement(
        "interface",
        "The strategy has all parts, shapes and dtypes that `Strategy` and `can` require.",
        _check_interface,
    ),
    Requirement(
        "accounting",
        "`steps`, `calls` and `truncated` are those of Algorithm 1 for a strategy that can be drafted. For any other, "
        "`calls` is the number of calls of `query`, `steps` is at least `calls` and at most the last time of a query, "
        "and `truncated` is None exactly if all rows have ended.",
        _check_accounting,
    ),
    Requirement(
        "examples apart",
        "An example of a batch has the same answer alone. Entries of queries that are not live are not read.",
        lambda case: scripted.check_batches(case.strategy, case.model.vocab_size),
    ),
    Requirement("stopped examples", "`stop` ends the given examples, and no others.", _check_stop),
    Requirement(
        "loss is a sum",
        "`loss` returns a sum and its divisor, which add up over examples and over slots.",
        lambda case: losses.check_sum(case.method, case.losses),
    ),
    Requirement(
        "loss ignores padding",
        "Slots with weight 0 change neither the loss nor its divisor.",
        lambda case: losses.check_padding(case.method, case.losses),
    ),
    Requirement(
        "loss teaches the targets",
        "At every slot with a weight, the gradient of `loss` raises the logit of a target token most. The divisor does "
        "not depend on logits.",
        lambda case: losses.check_targets(case.method, case.slots, case.losses),
    ),
    Requirement("layout is fixed", "`target` returns the same layout for the same rows.", _check_stable),
    Requirement(
        "learned settings",
        "`learned` has each setting of the method on which the layout of a target depends.",
        _check_learned_settings,
    ),
    Requirement("cuts are reported", "`was_cut` is True if fewer tokens change the layout.", _check_cuts),
    Requirement(
        "cuts are not ends",
        "In a target that is cut, a slot with a weight has an end token only if it has one in the whole target, too.",
        _check_cut_ends,
    ),
    Requirement(
        "whole answers",
        "`truncated` is None if decoding gives all tokens of a target that has fewer rows than the grid.",
        _check_truncated,
    ),
    Requirement(
        "same visible tokens",
        "Each slot with a weight sees the same tokens, at the same rows and times, in training and in decoding.",
        _check_layouts,
    ),
    Requirement(
        "rows are kept",
        "If each slot generates its target token, `order` and `read` return the rows of the target. `read` leaves out "
        "no row.",
        _check_read,
    ),
    Requirement(
        "blank rows",
        "A row without tokens changes no other row of the answer, or `target` refuses it.",
        _check_blank_rows,
    ),
    Requirement(
        "answers are learned",
        "Each token that determines the answer, the ends of rows included, has a slot with a weight, unless decoding "
        "forces it.",
        _check_learned,
    ),
    Requirement(
        "special ids",
        "Training and decoding also agree if the model has other ids of bos and of the end token.",
        _check_other_ids,
    ),
    Requirement(
        "prefixes are kept", "`add_prefixes` keeps the prefixes and the number of rows of a source.", _check_prefixes
    ),
    Requirement(
        "limit allows separators",
        "`extra_allowed_ids` has the tokens of a target that are neither tokens of its rows nor ends.",
        _check_allowed,
    ),
    Requirement("row of each slot", "`rows_of` assigns the tokens of each row to this row.", _check_rows_of),
    Requirement(
        "answers",
        "Records, with drafts and in streams too, equal a full recomputation: rows, `steps`, `calls`, `truncated` and "
        "scores.",
        lambda case: case.compared,
    ),
)
