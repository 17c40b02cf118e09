"""T5 encoder-decoders in JAX with a pipelined decoder: `pipejax.load(path).decode([...])`.

To read the code, begin with docs/read-this-first.md: it follows one answer through lab/one_answer.py.
"""

import importlib
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036  # a clone is run without pip, which would have looked
    raise ImportError(f"pipejax: found Python {sys.version.split()[0]} ({sys.executable}); expected 3.11 or newer")

from pipejax import moved
from pipejax.system import VERSION, environment  # before anything imports JAX: it pins settings
from pipejax.system.errors import UserError

if TYPE_CHECKING:
    from pipejax.config import Config, Overrides
    from pipejax.inference.answers import Record
    from pipejax.inference.generator import Generator
    from pipejax.inference.streaming import RowEvent
    from pipejax.methods import Method

__all__ = ["Backbone", "Config", "Generator", "Method", "Record", "RowEvent", "UserError", "fit", "load", "testing"]
__version__ = VERSION

moved.install()

# The module of each public name. A module is imported at the first access to its name, because `import pipejax` alone
# must not start JAX.
_PLACES = {
    "Backbone": "pipejax.model.backbone",
    "Config": "pipejax.config",
    "Generator": "pipejax.inference.generator",
    "Method": "pipejax.methods",
    "Record": "pipejax.inference.answers",
    "RowEvent": "pipejax.inference.streaming",
}


def load(
    path: str | Path,
    *,
    best: bool = False,
    revision: str = "",
    overrides: "Overrides" = (),
    method: "Method | str | None" = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> "Generator":
    """Opens the newest intact step of a checkpoint or run directory for decoding.

    Args:
      path: a directory written by `pipejax convert from-hf` or `pipejax train`, or the name of a model on the hub.
      best: opens the best evaluated step instead of the newest one.
      revision: the branch, tag or commit of a model on the hub. The path "owner/name@revision" is equivalent.
      overrides: settings of the sections grid and decode, and some settings of data: a dict such as {"grid.delay": 2,
        "decode.temperature": 0.7}, or a list of "key=value" strings.
      method: the method that `decode` uses by default, instead of the method of the training: the name of one, such as
        "sequential", or an object (docs/methods.md).
      adapters: directories of LoRA runs or of PEFT adapters, by the names that `Generator.adapted` accepts.

    Returns:
      A generator, whose `decode` maps sources to records.

    Raises:
      UserError: the directory does not exist or has no intact step, an override is not valid, or an adapter was
        trained on other weights.
    """
    _begin()
    from pipejax.data import hub
    from pipejax.inference.loading import load as open_checkpoint

    path = hub.at(path, revision) if revision else path
    return open_checkpoint(path, best=best, overrides=overrides, where="overrides", method=method, adapters=adapters)


def fit(
    config: "Config | str | Path | Mapping[str, object]",
    workdir: str | Path,
    *,
    train: object = None,
    dev: object = None,
    overrides: "Overrides" = (),
    method: "Method | str | None" = None,
) -> Path:
    """Trains until step `train.steps`, like `pipejax train`. Repeating the call resumes a run that was interrupted.

    Args:
      config: a Config, the path of a config file, or a dict of the settings that differ from the defaults.
      workdir: the directory for checkpoints and the log.
      train: the training examples, which replace `data.train`: a path, or records in memory as a list of dicts, a data
        frame (pandas, Polars), an Arrow table or a dataset of the library datasets. The settings of the section data
        name the fields and the template.
      dev: the examples of evaluations, which replace `data.dev`; the same types as `train`.
      overrides: settings of any section, in the same form as the `overrides` of `load`.
      method: the method to train, instead of the method of the config: the name of one, or an object
        (docs/methods.md).

    Returns:
      The directory of the run, which `load` opens.

    Raises:
      UserError: an argument or a setting is not valid, or the last checkpoint could not be written.
      KeyboardInterrupt: Ctrl-C was pressed; a checkpoint has been written. SIGTERM raises SystemExit instead.
    """
    _begin()
    from pipejax.training.fitting import train_run

    return train_run(config, workdir, train=train, dev=dev, overrides=overrides, method=method)


def _begin() -> None:
    """Checks that JAX can run on this machine, and warns about environment settings of JAX that were reset."""
    environment.check_platform()
    for setting in environment.IGNORED:
        warnings.warn(f"{setting}: ignored in the whole program since `import pipejax`", stacklevel=3)


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("pipejax.testing")
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'pipejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
