"""Former names of modules and classes. Imports by a former name work until the next release, with a warning."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Former module name -> present name, for modules that the documentation named or that a config names as MODULE:CLASS.
MOVED = {
    "pipejax.model.interface": "pipejax.model.backbone",
    "pipejax.model.umt5": "pipejax.backbones.umt5",
    "pipejax.model.t5gemma": "pipejax.backbones.t5gemma",
    "pipejax.model.t5gemma2": "pipejax.backbones.t5gemma2",
    "pipejax.methods.interface": "pipejax.methods.method",
    "pipejax.decoding.grammar": "pipejax.apps.schemas.grammar",
    "pipejax.decoding.interface": "pipejax.decoding.strategy",
    "pipejax.model.block_attention": "pipejax.kernels.block_attention",
    "pipejax.decoding.contract": "pipejax.decoding.strategy_checks",
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

# Former "MODULE:NAME" -> present one, for names that a module of another folder has now.
MOVED_NAMES = {
    "pipejax.decoding:Grammar": "pipejax.apps.schemas.grammar:Grammar",
    "pipejax.decoding:Table": "pipejax.apps.schemas.grammar:Table",
}


def present_class(name: str) -> str:
    """Returns the present name of a class "MODULE:CLASS", the form in which configs and checkpoints name classes."""
    module, colon, attribute = name.partition(":")
    return f"{MOVED.get(module, module)}{colon}{attribute}"


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module-level `__getattr__` that resolves former names of a module's attributes, with a warning.

    Args:
      module: the name of the module.
      names: the present name of each attribute, by its former name; those in `MOVED_NAMES` are resolved too.
    """

    def find(name: str) -> Any:
        if name not in names and f"{module}:{name}" not in MOVED_NAMES:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        present = names[name] if name in names else MOVED_NAMES[f"{module}:{name}"].replace(":", ".")
        line = f"{module}.{name} is now {present}; the former name will be removed in the next release"
        warnings.warn(line, DeprecationWarning, stacklevel=2)
        if name in names:
            return getattr(sys.modules[module], present)
        home, _, attribute = present.rpartition(".")
        return getattr(importlib.import_module(home), attribute)

    return find


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules by their former names. The import returns the same module object as the present name."""

    def __init__(self) -> None:
        """Creates a finder that has loaded nothing."""
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}  # specs of present modules, by former name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns a spec if `name` is a former name, otherwise None."""
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Imports the module by its present name. The warning points at the line of the import statement."""
        present = MOVED[spec.name]
        module = importlib.import_module(present)
        self._specs[spec.name] = module.__spec__
        warnings.warn(
            f"{spec.name} is now {present}; the former name will be removed in the next release",
            DeprecationWarning,
            stacklevel=2,  # `warnings` skips the frames of the import system
        )
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Restores the spec of the module, which the import system replaced. The module's code is not run again."""
        for former, spec in self._specs.items():
            if spec is not None and MOVED[former] == spec.name and module.__name__ == spec.name:
                module.__spec__ = spec


def install() -> None:
    """Makes former names importable, once for the process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
