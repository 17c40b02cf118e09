"""The architecture, read off the syntax trees: who imports whom, what stays where, how large, how named."""

import ast
import fnmatch
import graphlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from pipejax import config

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    [
        *ROOT.glob("*.py"),
        *(
            path
            for folder in ("pipejax", "benchmarks", "configs", "experiments", "tests")
            for path in (ROOT / folder).rglob("*.py")
        ),
    ]
)

# The rooms of pipejax/, lowest first. A module imports from its own room and from those below; the first match counts.
# Doors, which only start what lies in their room or in others, are above them all.
LAYERS = (
    ("system.errors", "system.fields", "system.files", "system.hashing"),
    ("system", "system.[!f]*", "grid"),
    ("config", "config.*"),
    ("metrics", "metrics.[!_]*"),
    ("decoding", "decoding.*", "model", "model.*"),
    ("data", "data.[!_]*"),
    ("checkpoint", "checkpoint.[!_]*"),
    ("convert", "convert.[!_]*"),
    ("inference", "inference.*"),
    ("training", "training.*"),
    ("__main__", "*.__main__", "system.formerly", "system.formerly.*", ""),
)
ROOMS = 14  # names in pipejax/, at the most

# Importing the first does not bring in the second, by whatever way.
NON_EDGES = (
    ("decoding*", "pipejax.model"),
    ("decoding*", "pipejax.data"),
    ("model.t5", "pipejax.grid"),
    ("model.t5", "pipejax.model.sharding"),
    ("model.*", "pipejax.decoding"),
    ("system.errors", "jax"),
    ("config*", "jax"),
    ("grid", "jax"),
    ("system.cli", "jax"),
    ("metrics*", "jax"),
    ("data*", "jax"),
)

# Libraries that may have to be replaced one day, or that are slow to import, and the modules that know them.
KEPT_IN: dict[str, tuple[str, ...]] = {
    "flax.linen": ("model.t5", "model.layers"),
    "flax.nnx": (),
    "orbax": ("checkpoint.arrays",),
    "transformers": ("convert.*", "data.tokenizer", "data.demo"),
    "tokenizers": ("convert.*", "data.tokenizer", "data.demo"),
    "huggingface_hub": ("convert.*", "data.tokenizer", "data.demo"),
    "tensorflow_datasets": ("data.*",),
    "grain": ("data.*",),
    "nltk": ("metrics.*",),
    "rouge_score": ("metrics.rouge",),
    "tensorflow": (),
    "torch": (),
}


def module_name(path: Path) -> str:
    """Of `pipejax/data/core.py` "pipejax.data.core", of `pipejax/data/__init__.py` "pipejax.data"."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.AST) -> set[str]:
    """Dotted names of all that is imported, inside functions and by `import_module` too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def mentioned(tree: ast.AST) -> set[str]:
    """What is imported, and the attributes by which more of an imported package can be reached."""
    names = imported(tree)
    packages = {name.partition(".")[0] for name in names}
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {name for name in attributes if name.partition(".")[0] in packages}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def short(module: str) -> str:
    return module.removeprefix("pipejax").removeprefix(".")


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(short(module), pattern) for pattern in patterns)


TREES = {module_name(path): ast.parse(path.read_text()) for path in (ROOT / "pipejax").rglob("*.py")}
NAMES = {module: mentioned(tree) for module, tree in TREES.items()}


def edges(module: str) -> set[str]:
    """The modules that `module` imports: of "pipejax.grid.visible" the longest part that is a module."""
    found = set()
    for name in imported(TREES[module]):
        while name and name not in TREES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {module, ""}


EDGES = {module: edges(module) for module in TREES}


def reach(module: str) -> set[str]:
    """The module and all that it imports, directly or not."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        if (here := waiting.pop()) not in seen:
            seen.add(here)
            waiting += EDGES[here]
    return seen


def layer(module: str) -> int:
    for i, patterns in enumerate(LAYERS):
        if matches(module, patterns):
            return i
    raise AssertionError(f"{module} has no place in LAYERS")


# Imports.


@pytest.mark.parametrize(
    "line",
    [
        "import flax\nflax.linen.Dense(3)",
        "from flax import linen",
        "from flax.linen import Dense",
        "def f():\n  import flax.linen as nn",
        "importlib.import_module('flax.linen')",
    ],
)
def test_every_way_to_import_is_seen(line: str) -> None:
    assert any(within(name, "flax.linen") for name in mentioned(ast.parse(line)))


def test_few_rooms() -> None:
    names = {path.name for path in (ROOT / "pipejax").iterdir()} - {"__pycache__"}
    assert len(names) <= ROOMS, sorted(names)


@pytest.mark.parametrize("module", sorted(TREES))
def test_imports_go_downwards(module: str) -> None:
    upwards = {target for target in EDGES[module] if layer(target) > layer(module)}
    assert not upwards, f"{module} imports from a layer above its own"


def test_no_import_cycle() -> None:
    graphlib.TopologicalSorter(EDGES).prepare()  # raises a CycleError that names the cycle


@pytest.mark.parametrize("pattern, target", NON_EDGES)
def test_non_edges(pattern: str, target: str) -> None:
    sources = [module for module in TREES if matches(module, (pattern,))]
    assert sources, f"no module is called {pattern}"
    for source in sources:
        through = [module for module in reach(source) if any(within(name, target) for name in NAMES[module])]
        assert not through, f"{source} reaches {target}"


@pytest.mark.parametrize("library", KEPT_IN)
def test_libraries_stay_where_they_are_known(library: str) -> None:
    users = {module for module, names in NAMES.items() if any(within(name, library) for name in names)}
    strangers = {module for module in users if not matches(module, KEPT_IN[library])}
    assert not strangers


# Tests.


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_no_test_module_imports_another(path: Path) -> None:
    """What several of them need is in tests/support, which holds no test itself."""
    tests = {other.stem for other in (ROOT / "tests").glob("test_*.py")} | {"conftest", "tests"}
    tree = ast.parse(path.read_text())
    assert not {name for name in imported(tree) if name.partition(".")[0] in tests}
    if path.parent.name == "support":
        assert not [node for node in ast.walk(tree) if getattr(node, "name", "").startswith("test_")]


# Files.


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_size_and_name(path: Path) -> None:
    if path.is_relative_to(ROOT / "pipejax"):
        assert len(path.read_text().splitlines()) <= 400, "a module this long has two subjects"
    says_nothing = {"utils", "util", "common", "helpers", "misc"}
    assert not says_nothing & set(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_assertions_can_fail(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            parts = list(ast.walk(node.test))
            varies = any(isinstance(part, ast.Name | ast.Call) for part in parts)
            assert varies and not isinstance(node.test, ast.Tuple), f"line {node.lineno} asserts a constant"


def test_configs_load() -> None:
    paths = sorted((ROOT / "configs").glob("*.py"))
    assert paths
    for path in paths:
        assert isinstance(config.load(path), config.Config)


# Requirements.


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines_of(file: str) -> list[str]:
    """The lines of a requirements file without comments."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return [line for line in lines if line]


def required() -> set[str]:
    return {normalised(re.split("[=;]", line)[0]) for line in lines_of("requirements.txt")}


@pytest.mark.parametrize("file", sorted(path.name for path in ROOT.glob("requirements*.txt")))
def test_requirements_are_pinned(file: str) -> None:
    pinned = r'[\w.-]+==[\w.]+(; python_version (<|>=) "3\.\d+")?'
    for line in lines_of(file):
        included = file != "requirements.txt" and re.fullmatch(r"-r requirements\.txt|jax\[\w+\]", line)
        assert included or re.fullmatch(pinned, line), line


def test_project_and_requirements_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {normalised(re.split("[<>=]", line)[0]) for line in project["dependencies"]} == required()


def test_every_import_is_required() -> None:
    """A library that arrives only because another one wants it can leave the same way."""
    scripts = [*(ROOT / "pipejax").rglob("*.py"), *ROOT.glob("*.py"), *(ROOT / "experiments").glob("demo.py")]
    distributions = importlib.metadata.packages_distributions()
    for path in scripts:
        names = {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}
        for name in names - {"pipejax", "experiments"} - sys.stdlib_module_names:
            candidates = {normalised(distribution) for distribution in distributions.get(name, [name])}
            assert candidates & required(), f"{path.relative_to(ROOT)} imports {name}"
