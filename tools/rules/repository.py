"""The files of a repository, as the rules read them: text, syntax trees, and imports by line."""

import ast
import fnmatch
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {".git", ".venv", "__pycache__", "_build", "build", "dist", "runs", "checkpoints"}
DOTTED = {".ci", ".github", ".gitignore", ".dockerignore"}


class Finding(NamedTuple):
    """A violation of a rule, at a line of a file."""

    file: str
    line: int
    message: str


class Name(NamedTuple):
    """A dotted name that a module imports or names, and its line."""

    name: str
    line: int


class Repository:
    """Files by their paths from the root, with "/" between parts. Each syntax tree is parsed once."""

    def __init__(self, files: Mapping[str, str | Path]) -> None:
        """Creates a repository of texts, or of files that are read when a rule needs them."""
        self._files = dict(files)
        parents = {str(parent) for name in files for parent in PurePosixPath(name).parents}
        self._places = {*files, *parents}
        self._texts: dict[str, str] = {}
        self._trees: dict[str, ast.Module] = {}

    @classmethod
    def read(cls, root: Path) -> "Repository":
        """Returns the repository in a directory, without environments, builds and caches."""
        files: dict[str, str | Path] = {}
        for directory, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in SKIPPED and (name[0] != "." or name in DOTTED)]
            files |= {(Path(directory) / name).relative_to(root).as_posix(): Path(directory) / name for name in names}
        return cls(files)

    def exists(self, place: str) -> bool:
        """Returns whether a path from the root, with "." and ".." in it, is a file or a folder."""
        return os.path.normpath(place) in self._places

    def named(self, *patterns: str) -> list[str]:
        """Returns the files that match one of some patterns, sorted; `*` matches "/" as well."""
        return sorted(name for name in self._files if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))

    def text(self, file: str) -> str:
        """Returns the text of a file; an empty text if the file does not exist."""
        if file not in self._texts:
            content = self._files.get(file, "")
            self._texts[file] = content if isinstance(content, str) else content.read_text(encoding="utf-8")
        return self._texts[file]

    def tree(self, file: str) -> ast.Module:
        """Returns the syntax tree of a Python file. Rules must not change it."""
        if file not in self._trees:
            self._trees[file] = ast.parse(self.text(file))
        return self._trees[file]

    @functools.cached_property
    def modules(self) -> dict[str, str]:
        """The file of each module of pipejax, by the module's dotted name."""
        return {module_name(file): file for file in self.named("pipejax/*.py")}

    @functools.cached_property
    def tests(self) -> list[str]:
        """The Python files of the test suite, with conftest.py and the modules that tests share."""
        return self.named("conftest.py", "tests/*.py", "lab/tests/*.py")

    @functools.cached_property
    def sources(self) -> list[str]:
        """All Python files, except the files that build the site."""
        folders = ("pipejax", "configs", "lab", "tests", "tools")
        return [file for file in self.named("*.py") if "/" not in file or file.startswith(folders)]


Rule = Callable[[Repository], Iterator[Finding]]


def module_name(file: str) -> str:
    """Returns "pipejax.data.text" for pipejax/data/text.py, and "pipejax.data" for pipejax/data/__init__.py."""
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def short(module: str) -> str:
    """Returns the name of a module without "pipejax"."""
    return module.removeprefix("pipejax").removeprefix(".")


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether the short name of a module matches one of some patterns."""
    return any(fnmatch.fnmatchcase(short(module), pattern) for pattern in patterns)


def within(name: str, package: str) -> bool:
    """Returns whether a dotted name is a package or lies in it."""
    return name == package or name.startswith(package + ".")


def dotted(node: ast.AST) -> str:
    """Returns "a.b.c" for a name or for attributes of a name, and an empty text for any other expression."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> Iterator[Name]:
    """Yields all dotted names that are imported, inside functions and by `import_module` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Name(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Name(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            constants = (argument for argument in node.args if isinstance(argument, ast.Constant))
            yield from (Name(str(argument.value), node.lineno) for argument in constants)


def mentioned(tree: ast.AST) -> Iterator[Name]:
    """Yields the imported names, and the names of attributes that are reached through imported packages."""
    names = list(imported(tree))
    yield from names
    packages = {name.partition(".")[0] for name, _ in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name.partition(".")[0] in packages:
                yield Name(name, node.lineno)
