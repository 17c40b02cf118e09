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

# Public names that are imported when they are first asked for: importing pipejax alone must not start JAX.
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
    method: "Method | None" = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> "Generator":
    """Opens the newest good step of a checkpoint or run directory for decoding.

    Args:
      path: what `pipejax convert from-hf` or `pipejax train` wrote.
      best: take the best evaluated step.
      revision: the branch, tag or commit of a model of the hub; "owner/name@revision" as `path` says the same.
      overrides: settings of the sections grid and decode, and some of data: a dict such as {"grid.delay": 2,
        "decode.temperature": 0.7}, or a list of "key=value" texts.
      method: a way of your own to write answers (docs/methods.md), instead of the run's.
      adapters: the directories of LoRA runs or of PEFT's, by names for `Generator.adapted`.

    Raises:
      UserError: no such directory, no good step in it, an override that does not fit, or an adapter of other weights.
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
    method: "Method | None" = None,
) -> Path:
    """Trains until `train.steps`, as `pipejax train` does. The same call again goes on where the run stopped.

    Args:
      config: a Config, the file of one, or a dict of the settings that differ from the defaults.
      workdir: where checkpoints and the log go.
      train: the examples to train on, in the place of `data.train`: a path, or records in memory as a list of dicts, a
        data frame (pandas, Polars), an Arrow table or a data set of the library datasets. Fields and template are those
        of the section data.
      dev: the examples of evaluations, in the place of `data.dev`; as `train`.
      overrides: settings, as of `load`; of any section.
      method: a way of your own to write answers (docs/methods.md), in the place of `method` in the config.

    Returns:
      the run's directory, which `load` opens.

    Raises:
      UserError: something given cannot be used, or the last checkpoint could not be written.
      KeyboardInterrupt: after Ctrl-C, once a checkpoint is written. After SIGTERM that is a SystemExit.
    """
    _begin()
    from pipejax.training.fitting import train_run

    return train_run(config, workdir, train=train, dev=dev, overrides=overrides, method=method)


def _begin() -> None:
    """Looks whether JAX can run here, and warns of settings of JAX that are not followed."""
    environment.check_platform()
    for setting in environment.IGNORED:
        warnings.warn(f"{setting}: not followed since `import pipejax`, in the whole program", stacklevel=3)


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("pipejax.testing")
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'pipejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
