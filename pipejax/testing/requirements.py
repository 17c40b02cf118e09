"""`Requirement`: a named rule that a custom method or backbone must follow, with the function that checks it."""

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from pipejax.system.errors import UserError

Case = TypeVar("Case")


class Requirement(NamedTuple, Generic[Case]):
    """A rule of `check_method` or `check_backbone`."""

    name: str  # a noun phrase, which the refusal names
    text: str  # the rule, as a sentence for the documentation
    check: Callable[[Case], object]  # raises a UserError if the piece breaks the rule


def check_all(requirements: Iterable[Requirement[Case]], case: Case) -> None:
    """Checks the rules in order.

    Raises:
      UserError: the piece breaks a rule; the message ends with the name of the rule.
    """
    for requirement in requirements:
        check_one(requirement, case)


def check_one(requirement: Requirement[Case], case: Case) -> None:
    """Checks a rule. Raises a UserError that ends with the name of the rule if the piece breaks the rule."""
    try:
        requirement.check(case)
    except UserError as error:
        hint = "; ".join(part for part in (error.hint, f"rule: {requirement.name}") if part)
        raise UserError(
            error.place, error.problem, found=error.found, expected=error.expected, hint=hint
        ) from error.__cause__
