"""Former names of modules: an import by such a name works, with a warning, until the next release."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Modules that pages of the documentation named, or that a config names as MODULE:CLASS, by their former names.
MOVED = {
    "pipejax.model.interface": "pipejax.model.backbone",
    "pipejax.model.umt5": "pipejax.backbones.umt5",
    "pipejax.model.t5gemma": "pipejax.backbones.t5gemma",
    "pipejax.model.t5gemma2": "pipejax.backbones.t5gemma2",
    "pipejax.methods.interface": "pipejax.methods.method",
    "pipejax.decoding.interface": "pipejax.decoding.strategy",
    "pipejax.decoding.pipelined": "pipejax.decoding.grid_strategy",
    "pipejax.decoding.sequential": "pipejax.decoding.grid_strategy",
    "pipejax.decoding.drafters.interface": "pipejax.decoding.drafters.drafter",
    "pipejax.config.schema": "pipejax.config.sections",
    "pipejax.inference.kernels": "pipejax.kernels.cpu_kernel",
    "pipejax.inference.wishes": "pipejax.inference.decoding_options",
    "pipejax.training.curves": "pipejax.apps.picture.curves",
    "pipejax.training.plan": "pipejax.training.memory",
    "pipejax.apps.records": "pipejax.offline.records",
    "pipejax.apps.evaluation": "pipejax.offline.evaluation",
}


def present_class(name: str) -> str:
    """Returns the present name of a class MODULE:CLASS, as configs and checkpoints name it."""
    module, colon, attribute = name.partition(":")
    return f"{MOVED.get(module, module)}{colon}{attribute}"


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module: its names by their former names, with a warning."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        line = f"{module}.{name} is now {names[name]}; the former name will be removed in the next release"
        warnings.warn(line, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its former name: the import gives the same module object as the present name."""

    def __init__(self) -> None:
        """Creates a finder that has loaded nothing."""
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}  # of the present modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns a spec for a former name, None for any other."""
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Imports the module by its present name, and warns at the line that imports it."""
        present = MOVED[spec.name]
        module = importlib.import_module(present)
        self._specs[spec.name] = module.__spec__
        warnings.warn(
            f"{spec.name} is now {present}; the former name will be removed in the next release",
            DeprecationWarning,
            stacklevel=2,  # frames of the import system are not counted
        )
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Restores the module's own spec, which the import system replaced; the module has run before."""
        for former, spec in self._specs.items():
            if spec is not None and MOVED[former] == spec.name and module.__name__ == spec.name:
                module.__spec__ = spec


def install() -> None:
    """Makes former names importable."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
