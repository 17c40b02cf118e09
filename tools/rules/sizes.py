"""Rules of the size of classes and functions in the code that decodes and serves."""

import ast
from collections.abc import Iterator

from tools.rules.repository import Finding, Repository, dotted

FOLDERS = ("pipejax/inference/*.py", "pipejax/decoding/*.py", "pipejax/apps/serving/*.py", "pipejax/offline/*.py")
MOST_METHODS, MOST_BRANCHES = 20, 20

_ALGORITHM = "the interface between the loop and a strategy (`Refillable`), and the rules of Algorithm 1 (`Rows`)"
_QUESTIONS = "an interface: one method for each question that the loop and its callers ask of a strategy"

# Classes and functions that are larger, as FILE:NAME, and the reason.
LARGER = {
    "pipejax/decoding/grid_strategy.py:GridStrategy": _ALGORITHM,
    "pipejax/decoding/grid_strategy.py:Pipelined": _ALGORITHM,
    "pipejax/decoding/grid_strategy.py:Sequential": _ALGORITHM,
    "pipejax/decoding/rows.py:OnGrid": _QUESTIONS,
    "pipejax/decoding/strategy.py:Refillable": _QUESTIONS,
    "pipejax/inference/generator.py:Generator": "the Python API, and the parts of it that pipejax's commands call",
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def methods_of(name: str, classes: dict[str, ast.ClassDef], seen: frozenset[str] = frozenset()) -> set[str]:
    """Returns the names of the methods of a class, with those inherited from our classes."""
    if name not in classes or name in seen:
        return set()
    found = {node.name for node in classes[name].body if isinstance(node, FUNCTIONS)}
    bases = (dotted(base.value if isinstance(base, ast.Subscript) else base) for base in classes[name].bases)
    return found.union(*(methods_of(base.rpartition(".")[2], classes, seen | {name}) for base in bases))


def branches_in(function: ast.AST) -> int:
    """Returns the number of branches: conditions, loops, handlers, cases, and the operands of `and` and `or`."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        else:
            branch = ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case
            count += isinstance(node, branch)
    return count


def classes_and_functions_are_small(repository: Repository) -> Iterator[Finding]:
    """A class has at most 20 methods, inherited ones included, and a function at most 20 branches."""
    trees = {file: repository.tree(file) for file in repository.named("pipejax/*.py")}
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for file in repository.named(*FOLDERS):
        for node in ast.walk(trees[file]):
            if isinstance(node, ast.ClassDef):
                found, most, what = len(methods_of(node.name, classes)), MOST_METHODS, "methods"
            elif isinstance(node, FUNCTIONS):
                found, most, what = branches_in(node), MOST_BRANCHES, "branches"
            else:
                continue
            is_listed = f"{file}:{node.name}" in LARGER
            if found > most and not is_listed:
                yield Finding(file, node.lineno, f"{node.name} has {found} {what}; expected at most {most}")
            elif is_listed and found <= most:
                yield Finding(file, node.lineno, f"{node.name} has only {found} {what}; LARGER need not list it")


RULES = (classes_and_functions_are_small,)
