"""Former names of modules, classes, settings, flags, keywords and request fields.

They work until the next release, with a warning.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pipejax import registry
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)

_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_Class = TypeVar("_Class")

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
    "pipejax.data.streams": "pipejax.data.examples",
    "pipejax.convert.adapters": "pipejax.convert.peft_adapters",
    "pipejax.data.__main__": "pipejax.apps.statistics.data_command",
    "pipejax.metrics.__main__": "pipejax.apps.scoring.metrics_command",
    "pipejax.checkpoint.__main__": "pipejax.apps.verify.checkpoint_command",
    "pipejax.data.demo": "pipejax.apps.demo",
    "pipejax.data.statistics": "pipejax.apps.statistics.split_statistics",
    "pipejax.apps.records": "pipejax.offline.records",
    "pipejax.apps.evaluation": "pipejax.offline.evaluation",
}

# Former "MODULE:NAME" -> present one, for names that a module of another folder has now.
MOVED_NAMES = {
    "pipejax.decoding:Grammar": "pipejax.apps.schemas.grammar:Grammar",
    "pipejax.decoding:Table": "pipejax.apps.schemas.grammar:Table",
    **{
        f"pipejax.metrics:{name}": f"pipejax.apps.compare.bootstrap:{name}"
        for name in ("bootstrap", "gap", "intervals")
    },
}

# Former dotted key of a setting -> present one.
MOVED_KEYS = {"train.objective": "train.method"}


@functools.cache
def note(former: str, present: str) -> None:
    """Logs, once in a process for each name, that a flag, a key or a field was given by its former name."""
    logger.warning(f"{former} is now {present}; the former name will be removed in the next release")


def both(former: str, present: str) -> UserError:
    """Returns the error for a value that was given by its former and by its present name."""
    hint = f"{former} is the former name of {present}"
    return UserError(present, found=f"{former} and {present}", expected=f"{present} alone", hint=hint)


def with_present_names(
    given: Mapping[str, Any], present: Mapping[str, str], say: Callable[[str, str], None]
) -> dict[str, Any]:
    """Returns values by name, with present names instead of former ones.

    Args:
      given: the values by name.
      present: the present name of each former one.
      say: called with the former and the present name of each value that was renamed.

    Raises:
      UserError: a value has both names.
    """
    renames = {former: name for former, name in present.items() if former in given}
    for former, name in renames.items():
        if name in given:
            raise both(former, name)
        say(former, name)
    return {renames.get(name, name): value for name, value in given.items()}


def keywords(**present: str) -> Callable[[_Callable], _Callable]:
    """Returns a decorator that lets a function take keywords by their former names, with a warning.

    A call with both names of a keyword raises a UserError.

    Args:
      present: the present name of each keyword, by its former name.
    """

    def bridge(function: _Callable) -> _Callable:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            return function(*args, **with_present_names(given, present, _warn_of_keyword))

        return call  # type: ignore[return-value]

    return bridge


def _warn_of_keyword(former: str, name: str) -> None:
    """Warns at the call of the function that calls `with_present_names`."""
    line = f"{former}= is now {name}=; the former keyword will be removed in the next release"
    warnings.warn(line, DeprecationWarning, stacklevel=4)


def attributes(**present: str) -> Callable[[type[_Class]], type[_Class]]:
    """Returns a decorator of a class whose attributes can be read by their former names, with a warning.

    Args:
      present: the present name of each attribute, by its former name.
    """

    def bridge(cls: type[_Class]) -> type[_Class]:
        for former, name in present.items():
            setattr(cls, former, _former_attribute(cls.__name__, former, name))
        return cls

    return bridge


def _former_attribute(owner: str, former: str, name: str) -> property:
    def read(self: object) -> Any:
        line = f"{owner}.{former} is now {name}; the former name will be removed in the next release"
        warnings.warn(line, DeprecationWarning, stacklevel=2)
        return getattr(self, name)

    return property(read, doc=f"The former name of `{name}`.")


def fields(**present: str) -> Callable[[type[_Class]], type[_Class]]:
    """Returns a decorator of a dataclass whose fields can be set and read by their former names, with a warning.

    `dataclasses.replace` needs present names, because it passes every field that it does not replace.

    Args:
      present: the present name of each field, by its former name.
    """

    def bridge(cls: type[_Class]) -> type[_Class]:
        create = cls.__init__

        @functools.wraps(create)
        def init(self: _Class, *args: Any, **given: Any) -> None:
            create(self, *args, **with_present_names(given, present, _warn_of_keyword))

        cls.__init__ = init  # type: ignore[assignment, method-assign]
        return attributes(**present)(cls)

    return bridge


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
        place = f"{module}:{names[name]}" if name in names else MOVED_NAMES.get(f"{module}:{name}")
        if place is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        present = place.replace(":", ".")
        line = f"{module}.{name} is now {present}; the former name will be removed in the next release"
        warnings.warn(line, DeprecationWarning, stacklevel=2)
        return registry.find(place)

    return find


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules by their former names. The import returns the same module object as the present name."""

    def __init__(self) -> None:
        """Creates a finder that has loaded nothing."""
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}  # during an import, by former name

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
        assert module.__spec__ is not None, "the import system has set it"
        module.__spec__ = self._specs.pop(module.__spec__.name)

    def get_code(self, name: str) -> types.CodeType | None:
        """Returns the code of a module that `python -m` runs by its former name; logs the present name."""
        package = name.removesuffix(".__main__")  # such as pipejax.data, whose command is pipejax data
        note(f"python -m {package}", package.replace(".", " "))
        spec = importlib.util.find_spec(MOVED[name])
        assert spec is not None and isinstance(spec.loader, importlib.abc.InspectLoader), "it is a module of pipejax"
        return spec.loader.get_code(MOVED[name])


def install() -> None:
    """Makes former names importable, once for the process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
