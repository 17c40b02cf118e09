"""Rules of names and texts in Python files: docstrings, file names, assertions, and names of methods in comparisons."""

import ast
import re
from collections.abc import Iterator

from tools.rules.repository import Finding, Repository, dotted, matches

VAGUE = ("What", "Who", "Whoever", "Whatever", "How")  # each hides the noun or the verb that the line is about
EMPTY_NAMES = {"utils", "util", "common", "helpers", "misc"}
OUR_METHODS = {"pipelined", "sequential"}
METHOD_CLASSES = {"Pipelined", "Sequential", "Beam", "Beams", "GridStrategy", "Rows", "NamedRows"}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(node: ast.AST) -> Iterator[DOCUMENTED]:
    """Yields the public definitions of a tree: itself, classes, functions and methods."""
    if isinstance(node, DOCUMENTED):
        yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, DOCUMENTED) and getattr(child, "name", "").startswith("_")):
                yield from public(child)


def docstrings_name_their_subject(repository: Repository) -> Iterator[Finding]:
    """A docstring begins with a noun or a verb: "The queries of a step." and not "What a step asks."."""
    for file in repository.named("pipejax/*.py"):
        for node in public(repository.tree(file)):
            first = re.split(r"\W", ast.get_docstring(node) or "", maxsplit=1)[0]
            if first in VAGUE:
                yield Finding(file, getattr(node, "lineno", 1), f"the docstring begins with {first!r}")


def file_names_say_something(repository: Repository) -> Iterator[Finding]:
    """No module or folder is named utils, common, helpers or misc."""
    for file in repository.sources:
        for part in {*file.removesuffix(".py").split("/")} & EMPTY_NAMES:
            yield Finding(file, 1, f"the name {part!r} does not say what the module holds")


def assertions_can_fail(repository: Repository) -> Iterator[Finding]:
    """A test asserts no constant and no tuple."""
    for file in repository.tests:
        for node in ast.walk(repository.tree(file)):
            if isinstance(node, ast.Assert):
                varies = any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(node.test))
                if not varies or isinstance(node.test, ast.Tuple):
                    yield Finding(file, node.lineno, "this assertion cannot fail")


def methods_are_not_compared(repository: Repository) -> Iterator[Finding]:
    """Code outside methods/ and config/ asks a method or its strategy for abilities, not for its name or class."""
    for module, file in repository.modules.items():
        if matches(module, ("methods*", "config*")):
            continue
        for node in ast.walk(repository.tree(file)):
            if isinstance(node, ast.Compare):
                sides = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
                if {part.value for part in sides if isinstance(part, ast.Constant)} & OUR_METHODS:
                    yield Finding(file, node.lineno, "compares the name of a method")
            elif isinstance(node, ast.Dict):
                if {key.value for key in node.keys if isinstance(key, ast.Constant)} & OUR_METHODS:
                    yield Finding(file, node.lineno, "a table by the names of methods")
            elif (
                isinstance(node, ast.Call)
                and dotted(node.func) in ("isinstance", "issubclass", "type")
                and {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & METHOD_CLASSES
            ):
                yield Finding(file, node.lineno, "asks for the class of a method")


RULES = (docstrings_name_their_subject, file_names_say_something, assertions_can_fail, methods_are_not_compared)
