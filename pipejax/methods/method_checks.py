"""Checks rules that a method could otherwise break without an error. Each violation raises a one-line UserError."""

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from pipejax.config import METHODS, SETTINGS, Config
from pipejax.methods.method import ABILITIES, Ids, Method, Target
from pipejax.system.errors import UserError, did_you_mean
from pipejax.system.fields import Facts

if TYPE_CHECKING:
    from pipejax.decoding import Strategy

SIDE = 64  # the largest number of rows and of times whose positions are compared


def strategy_of(method: Method, ids: Ids) -> "Strategy":
    """Returns the strategy of a method.

    Raises:
      UserError: `can` has an unknown ability, or the strategy violates the interface `Strategy`, or lacks the
        property that an ability in `can` needs.
    """
    from pipejax.decoding import strategy_checks

    made: Any = method.strategy(ids)
    if type(made).__hash__ is None:
        strategy_checks.refuse(
            method, "strategy", f"{type(made).__name__}, which is not hashable", "a frozen dataclass of numbers"
        )
    _check(type(method).__name__, frozenset(method.can), made)
    found: Strategy = made
    return found


@functools.lru_cache(maxsize=256)
def _check(name: str, can: frozenset[str], made: Any) -> None:
    """Performs the checks of `strategy_of`, once for each combination of arguments.

    Args:
      name: the class name of the method, for messages.
      can: the abilities of the method.
      made: the strategy.
    """
    from pipejax.decoding import Strategy, strategy_checks

    for ability in sorted(can - ABILITIES.keys()):
        hint = did_you_mean(ability, ABILITIES)
        raise UserError(f"{name}.can", found=f"{ability!r}", expected=f"some of {', '.join(ABILITIES)}", hint=hint)
    parts = {part: "" for kind in Strategy.__mro__[:2] for part in vars(kind) if not part.startswith("_")}
    able = {name: ability for name, ability in ABILITIES.items() if name in can}
    parts |= {part: f", for {name}" for name, ability in able.items() for part in ability.needs}
    for part in sorted(parts):
        if not hasattr(made, part):
            raise UserError(
                f"{type(made).__name__}.{part}",
                "missing",
                expected=f"the attribute that Strategy describes{parts[part]}",
            )
    ordered = " and ".join(name for name, ability in able.items() if ability.by_place)
    grows = " and ".join(name for name, ability in able.items() if ability.grows)
    rows, times = made.places
    if ordered and not rows * times:
        expected = f"at least one row and one time, or a method without the abilities {ordered}"
        strategy_checks.refuse(made, "places", made.places, expected)
    starts = np.asarray(made.start(np.arange(rows)))
    if starts.shape != (rows,) or not ((starts >= 0) & (starts < times)).all():
        strategy_checks.refuse(
            made, "start", f"{starts.tolist()} for rows 0, 1, ...", f"a time for each of {rows} rows, below {times}"
        )
    row, time = np.ogrid[: min(rows or SIDE, SIDE), : min(times or SIDE, SIDE)]
    position = np.asarray(made.position(row, time)) + 0 * (row + time)
    if position.dtype.kind != "i" or any((np.diff(position, axis=axis) < 0).any() for axis in (0, 1)):
        expected = "whole numbers that do not decrease with row or time, since no key may come after its query"
        strategy_checks.refuse(
            made, "position", f"{position[:2, :4].tolist()} for rows 0, 1 and times 0 to 3", expected
        )
    if (group := getattr(made, "group", None)) is not None:
        groups = np.asarray(group(np.arange(rows)))
        if groups.shape != (rows,) or groups.dtype.kind != "i" or (groups < 0).any():
            expected = "a whole number of 0 or more for each row"
            strategy_checks.refuse(made, "group", f"{groups.tolist()} for rows 0, 1, ...", expected)
        if "probe" in can:
            strategy_checks.refuse(
                made, "group", "groups of rows, and the ability probe", "no groups, or another `can`"
            )
    is_ours = type(made).__module__.startswith("pipejax.")
    if not is_ours and made.choose is None and made.drafter is None:
        strategy_checks.dry_run(made, ordered=ordered, grows=grows)


def check_target(target: Target, method: Method, *, vocabulary: int, most: int, where: str) -> None:
    """Raises a UserError if the layout of an example has a wrong size, shape, dtype or value (see `grid.Flat`).

    Args:
      target: the layout.
      method: the method that made it.
      vocabulary: V, the number of token ids.
      most: the `most` of `Method.target`, in tokens.
      where: the name of the example, for messages.
    """
    size, owner = len(target.flat.inputs), f"{where}: {type(method).__name__}.target"
    if not 0 < size <= method.most_slots(most):
        expected = f"1 to {method.most_slots(most)}, the result of most_slots for {most} tokens"
        raise UserError(owner, found=f"{size} slots", expected=expected)
    for part, x in zip(target.flat._fields, target.flat, strict=True):
        shape = (size, method.choices) if method.choices and part in ("targets", "weights") else (size,)
        kind = "float32" if part == "weights" else "int32"
        if getattr(x, "dtype", None) != kind or x.shape != shape:
            found = f"{getattr(x, 'dtype', type(x).__name__)}{[*np.shape(x)]}"
            raise UserError(f"{owner}: {part}", found=found, expected=f"{kind}{[*shape]}")
        below = vocabulary if part in ("inputs", "targets") else np.inf if part == "weights" else 2**24
        if not (x.min() >= 0 and x.max() < below):
            wrong = x[~((x >= 0) & (x < below))][0]
            raise UserError(f"{owner}: {part}", found=f"{wrong}", expected=f"0 or more, below {below}")


def ignored_settings(method: Method, config: Config, asked: Collection[str] = ()) -> list[str]:
    """Returns at most one line, which names the given settings that decoding with the method ignores.

    Args:
      method: the method.
      config: the config. For a custom method, settings that differ from the defaults count as given.
      asked: the keys of settings that a call or a command gave.
    """
    plain = Config()
    keys = [key for key, facts in SETTINGS.items() if _ignores(method, facts)]

    def given(key: str) -> bool:
        section, name = key.split(".")
        changed = getattr(getattr(config, section), name) != getattr(getattr(plain, section), name)
        return key in asked or (changed and method.name not in METHODS)

    found = list(filter(given, keys))
    return [f"{', '.join(found)}: {method.label} does not read {'it' if len(found) == 1 else 'them'}"] if found else []


def _ignores(method: Method, facts: Facts) -> bool:
    """Returns whether decoding with the method ignores a setting.

    A setting that asks for an ability is not ignored: it is an error if the method lacks the ability.
    """
    if "ability" in facts:
        return facts["ability"] not in method.can and not facts.get("asks")
    return facts.get("read_by", method.name) != method.name
