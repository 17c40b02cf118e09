"""Rules of imports: the order of layers, the core and the folders outside it, and the modules that import libraries."""

import ast
import functools
import graphlib
import re
from collections.abc import Iterable, Iterator

from tools.rules.repository import Finding, Name, Repository, dotted, imported, matches, mentioned, short, within

# The folders outside the core. The core names their modules in registries, as text, and imports none of them.
OUTER = ("apps", "backbones", "kernels")
REGISTRIES = ("registry", "moved")
NAMED_AT_MOST = 5  # times that the core names an app
NAMES_AT_MOST = 22  # in pipejax/

# The layers of pipejax, lowest first. A module imports from its own layer and from lower ones; the first match counts.
LAYERS = (
    ("system.errors", "system.fields", "system.files", "system.hashing", "system.strict_json", "moved", "registry"),
    ("system", "system.[!f]*", "grid"),
    ("model", "model.*"),
    ("backbones", "backbones.*"),
    ("config", "config.*"),
    ("metrics", "metrics.[!_]*"),
    ("decoding", "decoding.*"),
    ("methods", "methods.*"),
    ("data", "data.[!_]*"),
    ("checkpoint", "checkpoint.[!_]*"),
    ("convert", "convert.[!_]*"),
    ("inference", "inference.*"),
    ("kernels", "kernels.*"),
    ("offline", "offline.*", "testing", "testing.*"),
    ("training", "training.*"),
    ("apps", "apps.*"),
    ("__main__", "*.__main__", ""),
)

# Importing the first must not import the second, directly or through others.
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
    ("apps.scoring*", "jax"),
    ("apps.statistics*", "jax"),
)

# Libraries that may have to be replaced, or that are slow to import, and the modules that may import them.
KEPT_IN: dict[str, tuple[str, ...]] = {
    "flax.linen": ("model.t5", "model.layers", "backbones.*", "kernels.products"),
    "flax.nnx": (),
    "orbax": ("checkpoint.arrays",),
    "transformers": ("convert.*", "data.tokenizer", "apps.demo"),
    "tokenizers": ("convert.*", "data.tokenizer_file", "apps.demo"),
    "huggingface_hub": ("convert.*", "apps.hub.*", "data.hub", "data.tokenizer", "apps.demo"),
    "tensorflow_datasets": ("data.*", "apps.papers.*"),
    "grain": ("data.*", "training.train_command"),
    "nltk": ("metrics.*",),
    "rouge_score": ("metrics.rouge",),
    "starlette": ("apps.serving.*",),
    "uvicorn": ("apps.serving.serve_command", "apps.serving.connections"),
    "prometheus_client": ("apps.serving.*",),
    "tensorflow": (),
    "torch": ("convert.rows_in_torch",),  # no module of pipejax imports this one: it is written for transformers
    "ray": ("apps.bulk.ray_pool",),
}

# A config makes its Flax module when a caller asks for it: a program that only reads configs never imports JAX.
LATE = {"pipejax.model.t5_config": {"pipejax.model.t5"}}

JSON_READERS = {f"json.{name}" for name in ("load", "loads", "JSONDecoder", "decoder")}


@functools.lru_cache(maxsize=1)
def _graph(repository: Repository) -> dict[str, dict[str, int]]:
    """The modules that each module imports, with the first line of each import."""
    return {
        module: _edges(repository, module, imported(repository.tree(file)))
        for module, file in repository.modules.items()
    }


@functools.lru_cache(maxsize=1)
def _at_once(repository: Repository) -> dict[str, list[Name]]:
    """The names that a module imports when it is imported, without names in functions or for type checkers."""
    found = {}
    for module, file in repository.modules.items():
        later: set[Name] = set()
        for node in ast.walk(repository.tree(file)):
            never = isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"
            if never or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                later |= {name for statement in node.body for name in imported(statement)}  # type: ignore[attr-defined]
        found[module] = [name for name in imported(repository.tree(file)) if name not in later]
    return found


@functools.lru_cache(maxsize=1)
def _mentions(repository: Repository) -> dict[str, list[Name]]:
    """The names that each module imports or reaches through an import."""
    return {module: list(mentioned(repository.tree(file))) for module, file in repository.modules.items()}


def _edges(repository: Repository, module: str, names: Iterable[Name]) -> dict[str, int]:
    """The modules of imported names: for "pipejax.grid.visible" the longest part that is a module."""
    found: dict[str, int] = {}
    for name, line in names:
        while name and name not in repository.modules:
            name = name.rpartition(".")[0]
        if name not in {module, ""} | LATE.get(module, set()):
            found.setdefault(name, line)
    return found


def _layer(module: str) -> int:
    """The index of a module's layer; -1 if it has none."""
    return next((i for i, patterns in enumerate(LAYERS) if matches(module, patterns)), -1)


def _outer(module: str) -> str:
    """The folder outside the core that a module lies in, or an empty text."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "pipejax" and parts[1] in OUTER else ""


def _constants(tree: ast.AST) -> Iterator[Name]:
    """The texts of one line in a tree: names in registries, but no docstrings of several lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value):
            yield Name(node.value.replace(":", "."), node.lineno)


def every_module_has_a_layer(repository: Repository) -> Iterator[Finding]:
    """LAYERS lists each module."""
    for module, file in repository.modules.items():
        if _layer(module) < 0:
            yield Finding(file, 1, f"{module} has no place in LAYERS")


def imports_go_downwards(repository: Repository) -> Iterator[Finding]:
    """A module imports from its own layer and from lower ones."""
    for module, targets in _graph(repository).items():
        for target, line in targets.items():
            if _layer(target) > _layer(module):
                yield Finding(repository.modules[module], line, f"{target} is in a layer above {module}")


def core_imports_nothing_outside(repository: Repository) -> Iterator[Finding]:
    """The core imports no app, backbone or kernel: it finds them by the registries."""
    for module, targets in _graph(repository).items():
        for target, line in targets.items():
            if _outer(target) and not _outer(module):
                yield Finding(repository.modules[module], line, f"the core imports {target}")


def outer_folders_are_named_in_registries(repository: Repository) -> Iterator[Finding]:
    """Only registries name an app, `backbones` or `kernels` from outside, and an app at most NAMED_AT_MOST times.

    A file in `apps` is code that the apps share: an app may name it.
    """
    apps = {f"apps.{module.split('.')[2]}" for module in repository.modules if module.startswith("pipejax.apps.")}
    shared = {app for app in apps if repository.exists(f"pipejax/{app.replace('.', '/')}.py")}
    sites: dict[str, list[tuple[str, int]]] = {folder: [] for folder in (*sorted(apps), "backbones", "kernels")}
    for module, file in repository.modules.items():
        tree = repository.tree(file)
        names = [name for name in {*imported(tree), *_constants(tree)} if _outer(name.name)]
        for folder, found in sites.items():
            lines = sorted(line for name, line in names if within(short(name), folder))
            allowed = "apps" if folder in shared else folder
            if lines and not within(short(module), allowed):
                found += [(file, line) for line in lines]
                if short(module) not in REGISTRIES:
                    yield Finding(file, lines[0], f"pipejax.{folder} is named outside a registry")
    for app in sorted(apps):
        for file, line in sites[app][NAMED_AT_MOST:]:
            yield Finding(file, line, f"pipejax.{app} is named more than {NAMED_AT_MOST} times outside its folder")


def nothing_imports_testing(repository: Repository) -> Iterator[Finding]:
    """Only `pipejax.testing` imports its modules, which are for the tests of users; `pipejax` finds it by its name."""
    for module, targets in _graph(repository).items():
        for target, line in targets.items():
            if within(short(target), "testing") and not within(short(module), "testing") and module != "pipejax":
                yield Finding(repository.modules[module], line, f"{target} is for tests")


def few_names_in_the_package(repository: Repository) -> Iterator[Finding]:
    """pipejax/ holds at most NAMES_AT_MOST files and folders."""
    names = {name.split("/")[1] for name in repository.named("pipejax/*")}
    if len(names) > NAMES_AT_MOST:
        yield Finding("pipejax", 1, f"{len(names)} names in the package; expected at most {NAMES_AT_MOST}")


def no_import_cycle(repository: Repository) -> Iterator[Finding]:
    """No module imports itself through others."""
    try:
        graphlib.TopologicalSorter({module: set(targets) for module, targets in _graph(repository).items()}).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
        yield Finding(repository.modules[cycle[0]], 1, f"import cycle: {' <- '.join(cycle)}")


def modules_kept_apart(repository: Repository) -> Iterator[Finding]:
    """The modules in NON_EDGES do not import their targets, directly or through others."""
    graph, mentions = {module: set(targets) for module, targets in _graph(repository).items()}, _mentions(repository)
    names_at_once = _at_once(repository)
    graph_at_once = {module: set(_edges(repository, module, names)) for module, names in names_at_once.items()}
    for pattern, target in NON_EDGES:
        # JAX takes a second to start: a function may import it, but importing the module must not.
        ours = target.startswith("pipejax")
        edges, names = (graph, mentions) if ours else (graph_at_once, names_at_once)
        direct = {module for module in repository.modules if any(within(name, target) for name, _ in names[module])}
        direct -= {module for module, targets in LATE.items() if target in targets}
        for source in (module for module in repository.modules if matches(module, (pattern,))):
            for module in sorted(_reach(source, edges) & direct):
                yield Finding(repository.modules[source], 1, f"{source} imports {target} by way of {module}")


def _reach(module: str, graph: dict[str, set[str]]) -> set[str]:
    """The module and all modules that it imports, directly or not."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        if (here := waiting.pop()) not in seen:
            seen.add(here)
            waiting += graph[here]
    return seen


def json_is_read_in_one_module(repository: Repository) -> Iterator[Finding]:
    """Only `system.strict_json` reads JSON: it refuses an object with a duplicate key."""
    for module, names in _mentions(repository).items():
        if short(module) != "system.strict_json":
            for name, line in names:
                if name in JSON_READERS:
                    yield Finding(repository.modules[module], line, f"{name} accepts duplicate keys: use strict_json")


def libraries_stay_in_their_modules(repository: Repository) -> Iterator[Finding]:
    """A library of KEPT_IN is imported by the modules that are listed there, and by no other."""
    for module, names in _mentions(repository).items():
        for library, patterns in KEPT_IN.items():
            lines = [line for name, line in names if within(name, library)]
            if lines and not matches(module, patterns):
                yield Finding(repository.modules[module], min(lines), f"{library} is not imported here")


def tests_import_no_test(repository: Repository) -> Iterator[Finding]:
    """A test module imports no other: tests/support holds what several need, and no test."""
    tests = {file.rpartition("/")[2].removesuffix(".py") for file in repository.tests if "/support/" not in file}
    for file in repository.tests:
        for name, line in imported(repository.tree(file)):
            if name.partition(".")[0] in tests | {"conftest", "tests"}:
                yield Finding(file, line, f"imports the test module {name.partition('.')[0]}")
        if "/support/" in file:
            for node in ast.walk(repository.tree(file)):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("test_"):
                    yield Finding(file, node.lineno, "a test in tests/support is never run")


def only_lab_imports_lab(repository: Repository) -> Iterator[Finding]:
    """lab/ measures pipejax; neither pipejax nor its tests import it."""
    for file in repository.sources:
        if not file.startswith("lab/"):
            for name, line in imported(repository.tree(file)):
                if within(name, "lab"):
                    yield Finding(file, line, f"imports {name}: only lab/ does")


RULES = (
    every_module_has_a_layer,
    imports_go_downwards,
    core_imports_nothing_outside,
    outer_folders_are_named_in_registries,
    nothing_imports_testing,
    few_names_in_the_package,
    no_import_cycle,
    modules_kept_apart,
    json_is_read_in_one_module,
    libraries_stay_in_their_modules,
    tests_import_no_test,
    only_lab_imports_lab,
)
