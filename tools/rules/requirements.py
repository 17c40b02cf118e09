"""Rules of requirements: pyproject.toml holds lower bounds, the requirements files hold exact versions."""

import ast
import functools
import importlib.metadata
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from tools.rules.repository import Finding, Name, Repository, dotted, imported

MARKER = r'(; python_version (?:<|>=) "3\.\d+")?'
DEMO = ("train.py", "decode.py", "lab/demo.py")


class Pin(NamedTuple):
    """An exact version in a requirements file."""

    name: str
    marker: str
    version: str
    line: int


def _normalised(name: str) -> str:
    """The name of a library as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _files(repository: Repository) -> list[str]:
    """The requirements of this repository's own environment; requirements/peers/ are for other environments."""
    return repository.named("requirements.txt", "requirements/[!p]*.txt", "requirements/p[!e]*.txt")


def _lines(repository: Repository, file: str) -> Iterator[tuple[int, str]]:
    """The lines of a requirements file without comments, with their numbers."""
    for number, line in enumerate(repository.text(file).splitlines(), 1):
        if text := line.partition("#")[0].strip():
            yield number, text


def _pins(repository: Repository, file: str) -> list[Pin]:
    """The exact versions in a file, without the versions in the files that it includes."""
    found = ((number, re.fullmatch(rf"([\w.-]+)==([\w.]+){MARKER}", line)) for number, line in _lines(repository, file))
    return [Pin(_normalised(pin[1]), pin[3] or "", pin[2], number) for number, pin in found if pin]


def _project(repository: Repository) -> Mapping[str, Any]:
    """The table "project" of pyproject.toml."""
    table: Mapping[str, Any] = tomllib.loads(repository.text("pyproject.toml"))["project"]
    return table


def _wanted(repository: Repository, *extras: str) -> dict[str, Requirement]:
    """The requirements in pyproject.toml of the core and some extras, with the extras that these include."""
    project = _project(repository)
    lines, waiting = list(project["dependencies"]), list(extras)
    while waiting:
        lines += project.get("optional-dependencies", {}).get(waiting.pop(), [])
        waiting += [inner for line in lines for inner in re.findall(r"^pipejax\[(\w+)\]$", line)]
        lines = [line for line in lines if not line.startswith("pipejax[")]
    return {_normalised(requirement.name): requirement for requirement in map(Requirement, lines)}


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """The installed libraries by the packages that they hold; this takes a second."""
    return importlib.metadata.packages_distributions()


def _libraries(names: Iterable[Name]) -> dict[str, tuple[set[str], int]]:
    """The foreign packages that are imported: the libraries that may hold each, and its first line."""
    # Python's own modules, including modules of 3.14 and later, and the stubs of type checkers.
    theirs = sys.stdlib_module_names | {"compression", "_typeshed", "pipejax", "lab"}
    found: dict[str, tuple[set[str], int]] = {}
    for full, line in names:
        name = full.partition(".")[0]
        if name not in theirs:
            found.setdefault(name, ({_normalised(x) for x in _distributions().get(name, [name])}, line))
    return found


def requirements_are_pinned(repository: Repository) -> Iterator[Finding]:
    """A line is an exact version, the one file that is included, or a variant of the JAX that is pinned there."""
    files = _files(repository)
    for file in [*files, *repository.named("requirements/peers/*.txt")]:
        pinned, included = {pin.line for pin in _pins(repository, file)}, 0
        for number, line in _lines(repository, file):
            if line.startswith("-r "):
                included += 1
                place = posixpath.normpath(posixpath.join(posixpath.dirname(file), line.removeprefix("-r ")))
                if place not in files or included > 1:
                    yield Finding(file, number, "a file includes at most one other, of this environment")
            elif number not in pinned and not re.fullmatch(r"jax\[\w+\]", line):
                yield Finding(file, number, f"{line} is no exact version")


def versions_are_pinned_once(repository: Repository) -> Iterator[Finding]:
    """The version of a library is in one requirements file."""
    seen: dict[tuple[str, str], str] = {}
    for file in _files(repository):
        for pin in _pins(repository, file):
            if (first := seen.setdefault((pin.name, pin.marker), f"{file}:{pin.line}")) != f"{file}:{pin.line}":
                yield Finding(file, pin.line, f"{pin.name} is pinned in {first} too")


def compilers_have_the_version_of_jax(repository: Repository) -> Iterator[Finding]:
    """The compilers for absent GPUs have the version of the JAX in requirements.txt."""
    jax = {pin.marker: pin.version for pin in _pins(repository, "requirements.txt") if pin.name == "jax"}
    file = "requirements/programs.txt"
    for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        pins = [pin for pin in _pins(repository, file) if pin.name == name]
        if {pin.marker: pin.version for pin in pins} != jax:
            yield Finding(file, min((pin.line for pin in pins), default=1), f"{name} has another version than jax")


def requirements_are_those_of_the_project(repository: Repository) -> Iterator[Finding]:
    """requirements.txt pins the core and the extras train, metrics and data."""
    wanted, pins = _wanted(repository, "train", "metrics", "data"), _pins(repository, "requirements.txt")
    for name in sorted(set(wanted) - {pin.name for pin in pins}):
        yield Finding("requirements.txt", 1, f"{name} of pyproject.toml is not pinned")
    for pin in pins:
        if pin.name not in wanted:
            yield Finding("requirements.txt", pin.line, f"{pin.name} is not in pyproject.toml")


def pins_are_within_bounds(repository: Repository) -> Iterator[Finding]:
    """A pinned version lies within the bounds of pyproject.toml."""
    every = _wanted(repository, *_project(repository).get("optional-dependencies", {}))
    for file in _files(repository):
        for pin in _pins(repository, file):
            if pin.name in every and not every[pin.name].specifier.contains(pin.version):
                bound = every[pin.name].specifier
                yield Finding(file, pin.line, f"{pin.name}=={pin.version} is not within {bound} of pyproject.toml")


def demo_needs_only_requirements(repository: Repository) -> Iterator[Finding]:
    """The demo imports only libraries of requirements.txt."""
    required = {pin.name for pin in _pins(repository, "requirements.txt")}
    for file in repository.named(*DEMO):
        for name, (candidates, line) in _libraries(imported(repository.tree(file))).items():
            if not candidates & required:
                yield Finding(file, line, f"{name} is not in requirements.txt")


def extras_are_imported_with_their_names(repository: Repository) -> Iterator[Finding]:
    """A library that the core lacks is imported inside `with extra(NAME, ...)`.

    If the library is absent, users then see the name of the extra and no traceback. A library that is installed only
    because another library requires it counts as absent: a later version of the other library may drop it.
    """
    core = set(_wanted(repository))
    for module, file in repository.modules.items():
        if module == "pipejax.convert.rows_in_torch":  # transformers runs this module
            continue
        inside: set[Name] = set()
        for node in ast.walk(repository.tree(file)):
            call = node.items[0].context_expr if isinstance(node, ast.With) else None
            if isinstance(call, ast.Call) and dotted(call.func) == "extra":
                inside |= set(imported(node))
                if isinstance(call.args[0], ast.Constant):
                    extra = str(call.args[0].value)
                    for name, (candidates, line) in _libraries(imported(node)).items():
                        if not candidates & set(_wanted(repository, extra)):
                            yield Finding(file, line, f"{name} is not in the extra {extra}")
        outside = (name for name in imported(repository.tree(file)) if name not in inside)
        for name, (candidates, line) in _libraries(outside).items():
            if not candidates & core:
                yield Finding(file, line, f"{name} is not required by the core: import it inside `with extra(...)`")


RULES = (
    requirements_are_pinned,
    versions_are_pinned_once,
    compilers_have_the_version_of_jax,
    requirements_are_those_of_the_project,
    pins_are_within_bounds,
    demo_needs_only_requirements,
    extras_are_imported_with_their_names,
)
