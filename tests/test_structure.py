"""The architecture, read off the syntax trees: who imports whom, what stays where, how large, how named."""

import ast
import fnmatch
import functools
import graphlib
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pipejax import config

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    [
        *ROOT.glob("*.py"),
        *(path for folder in ("pipejax", "configs", "lab", "tests", "tools") for path in (ROOT / folder).rglob("*.py")),
    ]
)

# The rooms of pipejax/, lowest first. A module imports from its own room and from those below; the first match counts.
# Doors, which only start what lies in their room or in others, are above them all.
LAYERS = (
    ("system.errors", "system.fields", "system.files", "system.hashing", "system.strict_json", "moved", "registry"),
    ("system", "system.[!f]*", "grid"),
    ("model", "model.*"),
    ("config", "config.*"),
    ("metrics", "metrics.[!_]*"),
    ("decoding", "decoding.*"),
    ("methods", "methods.*"),
    ("data", "data.[!_]*"),
    ("checkpoint", "checkpoint.[!_]*"),
    ("convert", "convert.[!_]*"),
    ("inference", "inference.*"),
    ("offline", "offline.*", "testing"),
    ("training", "training.*"),
    ("backbones", "backbones.*"),
    ("kernels", "kernels.*"),
    ("apps", "apps.*"),
    ("__main__", "*.__main__", ""),
)
ROOMS = 22  # names in pipejax/, at the most

# Importing the first does not bring in the second, by whatever way.
NON_EDGES = (
    ("decoding*", "pipejax.model.t5"),
    ("decoding*", "pipejax.model.layers"),
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
    "flax.linen": ("model.t5", "model.layers", "backbones.*", "kernels.products"),
    "flax.nnx": (),
    "orbax": ("checkpoint.arrays",),
    "transformers": ("convert.*", "data.tokenizer", "data.demo"),
    "tokenizers": ("convert.*", "data.tokenizer_file", "data.demo"),
    "huggingface_hub": ("convert.*", "apps.hub.*", "data.hub", "data.tokenizer", "data.demo"),
    "tensorflow_datasets": ("data.*", "apps.papers.*"),
    "grain": ("data.*", "training.train_command"),
    "nltk": ("metrics.*",),
    "rouge_score": ("metrics.rouge",),
    "starlette": ("apps.serving.*",),
    "uvicorn": ("apps.serving.serve_command", "apps.serving.connections"),
    "prometheus_client": ("apps.serving.*",),
    "tensorflow": (),
    "torch": ("convert.rows_in_torch",),  # which nothing here imports: it is written for transformers
    "ray": ("apps.bulk.ray_pool",),
}


def module_name(path: Path) -> str:
    """Of `pipejax/data/text.py` "pipejax.data.text", of `pipejax/data/__init__.py` "pipejax.data"."""
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


def at_once(tree: ast.AST) -> ast.AST:
    """The tree without what importing it does not run: bodies of functions, and what is for type checkers."""
    tree = ast.parse(ast.unparse(tree))
    for node in ast.walk(tree):
        never = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if never or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def edges(module: str, tree: ast.AST) -> set[str]:
    """The modules that `module` imports: of "pipejax.grid.visible" the longest part that is a module."""
    found = set()
    for name in imported(tree):
        while name and name not in TREES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {module, ""}


# A config makes its Flax module when it is asked to: whoever reads configs alone never imports JAX.
LATE = {"pipejax.model.t5_config": {"pipejax.model.t5"}}
EDGES = {module: edges(module, tree) - LATE.get(module, set()) for module, tree in TREES.items()}
AT_ONCE = {module: at_once(tree) for module, tree in TREES.items()}
EDGES_AT_ONCE = {module: edges(module, tree) for module, tree in AT_ONCE.items()}
NAMES_AT_ONCE = {module: imported(tree) for module, tree in AT_ONCE.items()}


def reach(module: str, graph: dict[str, set[str]]) -> set[str]:
    """The module and all that it imports, directly or not."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        if (here := waiting.pop()) not in seen:
            seen.add(here)
            waiting += graph[here]
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


# The core is everything else. It knows these folders only by the texts of `registry`, so that it works without them.
APPS = sorted(path.name for path in (ROOT / "pipejax" / "apps").iterdir() if (path / "__init__.py").exists())
OUTSIDE = {"backbones": ("backbones*",), "kernels": ("kernels*",)} | {
    f"apps.{app}": (f"apps.{app}", f"apps.{app}.*") for app in APPS
}
# Modules that still import an app themselves.
SCHEMAS_IN_CORE = {"inference.generator", "inference.running_batch", "inference.sources"}
SCHEMAS_IN_SERVING = {f"apps.serving.{name}" for name in ("app", "engine", "requests", "row_text")}
EXCEPTIONS = {"apps.schemas": SCHEMAS_IN_CORE | SCHEMAS_IN_SERVING}


def texts_in(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("folder", OUTSIDE)
def test_folders_outside_the_core_are_named_in_registries_alone(folder: str) -> None:
    inside = {module for module in TREES if matches(module, OUTSIDE[folder])}
    assert inside
    naming = {
        short(module)
        for module in TREES.keys() - inside
        if (EDGES[module] | {text.partition(":")[0] for text in texts_in(TREES[module])}) & inside
    }
    assert not naming - {"registry", "moved", *EXCEPTIONS.get(folder, ())}
    places = {place.replace(":", ".") for place in texts_in(TREES["pipejax.registry"])}
    assert not folder.startswith("apps.") or sum(within(place, f"pipejax.{folder}") for place in places) <= 5


def test_few_rooms() -> None:
    names = {path.name for path in (ROOT / "pipejax").iterdir()} - {"__pycache__"}
    assert len(names) <= ROOMS, sorted(names)


@pytest.mark.parametrize("module", sorted(TREES))
def test_imports_go_downwards(module: str) -> None:
    upwards = {target for target in EDGES[module] if layer(target) > layer(module)}
    if short(module) in SCHEMAS_IN_CORE:
        upwards.discard("pipejax.apps.schemas.row_schema")
    assert not upwards, f"{module} imports from a layer above its own"


def test_no_import_cycle() -> None:
    graphlib.TopologicalSorter(EDGES).prepare()  # raises a CycleError that names the cycle


@pytest.mark.parametrize("pattern, target", NON_EDGES)
def test_non_edges(pattern: str, target: str) -> None:
    sources = [module for module in TREES if matches(module, (pattern,))]
    assert sources, f"no module is called {pattern}"
    # Ours stay apart in any case. JAX takes a second to start, so what matters is that importing does not start it.
    graph, names = (EDGES, NAMES) if target.startswith("pipejax") else (EDGES_AT_ONCE, NAMES_AT_ONCE)
    for source in sources:
        through = [
            module
            for module in reach(source, graph)
            if target not in LATE.get(module, ()) and any(within(name, target) for name in names[module])
        ]
        assert not through, f"{source} reaches {target}"


def test_json_is_read_in_one_place() -> None:
    """`strict_json` refuses a key that an object has twice."""
    readers = {f"json.{name}" for name in ("load", "loads", "JSONDecoder", "decoder")}
    users = {short(module) for module, names in NAMES.items() if readers & names}
    assert users == {"system.strict_json"}


@pytest.mark.parametrize("library", KEPT_IN)
def test_libraries_stay_where_they_are_known(library: str) -> None:
    users = {module for module, names in NAMES.items() if any(within(name, library) for name in names)}
    strangers = {module for module in users if not matches(module, KEPT_IN[library])}
    assert not strangers


# Tests: of pipejax in tests/, of what measures it in lab/tests.

TESTS = [ROOT / "conftest.py", *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "lab/tests").rglob("*.py"))]


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_no_test_module_imports_another(path: Path) -> None:
    """What several of them need is in tests/support, which holds no test itself."""
    tests = {other.stem for other in TESTS if other.parent.name == "tests"} | {"conftest", "tests"}
    tree = ast.parse(path.read_text())
    assert not {name for name in imported(tree) if name.partition(".")[0] in tests}
    if path.parent.name == "support":
        assert not [node for node in ast.walk(tree) if str(getattr(node, "name", "")).startswith("test_")]


@pytest.mark.parametrize("module", ["pipejax", "configs", "tests", "tools"])
def test_only_lab_knows_lab(module: str) -> None:
    """It stands beside the product: what both need is in tests/support."""
    for path in [*ROOT.glob("*.py"), *(ROOT / module).rglob("*.py")]:
        names = imported(ast.parse(path.read_text()))
        assert not {name for name in names if within(name, "lab")}, path


# Methods.

OURS = ("pipelined", "sequential")
CLASSES = {"Pipelined", "Sequential", "Beam", "Beams", "GridStrategy", "Rows", "NamedRows"}


@pytest.mark.parametrize("module", sorted(module for module in TREES if not matches(module, ("methods*", "config*"))))
def test_no_method_is_told_by_name_or_type(module: str) -> None:
    """What a room needs to know is asked of the method or its strategy, so that those of others work as well."""
    for node in ast.walk(TREES[module]):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict) and {ast.unparse(key).strip("'") for key in node.keys if key} & {*OURS}:
            raise AssertionError(f"line {node.lineno}: a table by the names of methods")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
            named = {part.id if isinstance(part, ast.Name) else "" for part in ast.walk(node)}
            assert not named & CLASSES, f"line {node.lineno} asks for the type of a method"
        constants = {part.value for one in asked for part in ast.walk(one) if isinstance(part, ast.Constant)}
        assert not constants & {*OURS}, f"{ast.unparse(node)} asks for the name of a method"


# Docstrings.

VAGUE = ("What", "Who", "Whoever", "Whatever", "How")  # each hides the noun or the verb that the line is about
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(node: ast.AST, name: str) -> Iterator[tuple[str, DOCUMENTED]]:
    """Yields what is public in a tree, by its dotted name: itself, classes, functions and methods."""
    if isinstance(node, DOCUMENTED):
        yield name, node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in ast.iter_child_nodes(node):
            own = getattr(child, "name", None) if isinstance(child, DOCUMENTED) else None
            if own is None or not own.startswith("_"):
                yield from public(child, f"{name}.{own}" if own else name)


def begins_vaguely(line: str) -> bool:
    return re.split(r"\W", line, maxsplit=1)[0] in VAGUE


def test_first_words_are_told_apart() -> None:
    source = 'class A:\n  """What it is."""\n  if True:\n    def f(self):\n      """However."""\n  def _g(self): ...'
    found = {name: ast.get_docstring(node) or "" for name, node in public(ast.parse(source), "m")}
    assert found == {"m": "", "m.A": "What it is.", "m.A.f": "However."}
    assert [name for name, line in found.items() if begins_vaguely(line)] == ["m.A"]


@pytest.mark.parametrize("module", sorted(TREES))
def test_docstrings_name_the_thing(module: str) -> None:
    """A noun phrase for a thing, a verb for a function: "The queries of a step." and not "What a step asks."."""
    lines = {name: ast.get_docstring(node) or "" for name, node in public(TREES[module], module)}
    vague = {name: line.partition("\n")[0] for name, line in lines.items() if begins_vaguely(line)}
    assert not vague, f"each begins with one of {VAGUE}"


# Files.


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_name(path: Path) -> None:
    says_nothing = {"utils", "util", "common", "helpers", "misc"}
    assert not says_nothing & set(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_assertions_can_fail(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            parts = list(ast.walk(node.test))
            varies = any(isinstance(part, ast.Name | ast.Call) for part in parts)
            assert varies and not isinstance(node.test, ast.Tuple), f"line {node.lineno} asserts a constant"


def test_configs_load() -> None:
    paths = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem != "paper")  # a part of six of them
    assert paths
    for path in paths:
        assert isinstance(config.load(path), config.Config)


# Requirements: pyproject.toml names the libraries and what each is at least; the requirements lock exact versions.

REQUIREMENTS = ["requirements.txt", *sorted(f"requirements/{path.name}" for path in ROOT.glob("requirements/*.txt"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MARKER = r'(; python_version (?:<|>=) "3\.\d+")?'


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines_of(file: str) -> list[str]:
    """The lines of a requirements file without comments."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return [line for line in lines if line]


def pins(file: str) -> dict[tuple[str, str], str]:
    """The versions that a file itself writes, by library and marker."""
    found = (re.fullmatch(rf"([\w.-]+)==([\w.]+){MARKER}", line) for line in lines_of(file))
    return {(normalised(pin[1]), pin[3] or ""): pin[2] for pin in found if pin}


def wanted(*extras: str) -> dict[str, Requirement]:
    """What pyproject.toml asks for, by library: for the core, and for these extras with those that they include."""
    lines, waiting = list(PROJECT["dependencies"]), list(extras)
    while waiting:
        lines += PROJECT["optional-dependencies"][waiting.pop()]
        waiting += [inner for line in lines for inner in re.findall(r"^pipejax\[(\w+)\]$", line)]
        lines = [line for line in lines if not line.startswith("pipejax[")]
    return {normalised(requirement.name): requirement for requirement in map(Requirement, lines)}


# Of environments of their own, which may have other versions of a library.
PEERS = sorted(f"requirements/peers/{path.name}" for path in ROOT.glob("requirements/peers/*.txt"))


@pytest.mark.parametrize("file", [*REQUIREMENTS, *PEERS])
def test_requirements_are_pinned(file: str) -> None:
    """A line is an exact version, the one file that is included, or a variant of the JAX that is pinned there."""
    others = len(lines_of(file)) - len(pins(file))
    included = [line for line in lines_of(file) if line.startswith("-r ")]
    variants = [line for line in lines_of(file) if re.fullmatch(r"jax\[\w+\]", line)]
    assert others == len(included) + len(variants) and len(included) <= 1
    places = [(ROOT / file).parent / line.removeprefix("-r ") for line in included]
    assert all(str(place.resolve().relative_to(ROOT)) in REQUIREMENTS for place in places)


def test_each_version_is_written_once() -> None:
    written = [pin for file in REQUIREMENTS for pin in pins(file)]
    assert sorted(set(written)) == sorted(written)


def test_the_compilers_are_those_of_the_jax_that_is_pinned() -> None:
    jax = {marker: version for (name, marker), version in pins("requirements.txt").items() if name == "jax"}
    programs = pins("requirements/programs.txt")
    for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        assert {marker: version for (found, marker), version in programs.items() if found == name} == jax


def test_project_and_requirements_agree() -> None:
    assert set(wanted("train", "metrics", "data")) == {name for name, _ in pins("requirements.txt")}
    every = wanted(*PROJECT["optional-dependencies"])
    locked = [(name, version) for file in REQUIREMENTS for (name, _), version in pins(file).items()]
    for name, version in locked:
        assert name not in every or every[name].specifier.contains(version), f"{name}=={version}"


def test_the_demo_needs_no_more_than_requirements() -> None:
    required = {name for name, _ in pins("requirements.txt")}
    for path in [ROOT / "train.py", ROOT / "decode.py", ROOT / "lab" / "demo.py"]:
        for name, candidates in libraries(ast.parse(path.read_text())).items():
            assert candidates & required, f"{path.relative_to(ROOT)} imports {name}"


DISTRIBUTIONS = functools.cache(importlib.metadata.packages_distributions)  # by package; it takes a second


def libraries(tree: ast.AST) -> dict[str, set[str]]:
    """The packages of others that are imported, and for each the libraries that may have brought it."""
    distributions = DISTRIBUTIONS()
    ours = {"pipejax", "lab"}
    # Python's own from 3.14 on, and the one that type checkers bring along.
    theirs = sys.stdlib_module_names | {"compression", "_typeshed"}
    names = {name.partition(".")[0] for name in imported(tree)} - ours - theirs
    return {name: {normalised(library) for library in distributions.get(name, [name])} for name in names}


@pytest.mark.parametrize("module", sorted(TREES.keys() - {"pipejax.convert.rows_in_torch"}))  # which transformers runs
def test_what_the_core_lacks_is_imported_from_its_extra(module: str) -> None:
    """That is, inside `with extra(NAME, ...)`: where it is absent people read its name, not a traceback.

    A library that arrives only because another one wants it counts as absent: it can leave the same way.
    """
    tree = ast.parse(ast.unparse(TREES[module]))
    for node in ast.walk(tree):
        call = node.items[0].context_expr if isinstance(node, ast.With) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "extra":
            if isinstance(call.args[0], ast.Constant):
                for name, candidates in libraries(node).items():
                    assert candidates & set(wanted(str(call.args[0].value))), f"{name} is not in the extra"
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
    for name, candidates in libraries(tree).items():
        assert candidates & set(wanted()), f"{name} is not required by the core"
