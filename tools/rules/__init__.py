"""The rules of this repository that ruff and mypy cannot express: `python -m tools.rules` checks all of them."""

from tools.rules import imports, pages, requirements, sizes, text
from tools.rules.repository import Finding, Repository, Rule

__all__ = ["RULES", "Finding", "Repository", "Rule", "broken"]

RULES: tuple[Rule, ...] = (*imports.RULES, *text.RULES, *sizes.RULES, *requirements.RULES, *pages.RULES)


def broken(repository: Repository, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """Returns a line FILE:LINE: MESSAGE (RULE) for each violation, in order of files and lines."""
    found = sorted((finding, rule.__name__) for rule in rules for finding in rule(repository))
    return [f"{finding.file}:{finding.line}: {finding.message} ({name})" for finding, name in found]
