"""T5 encoder-decoders in JAX with a pipelined decoder: `pipejax.load(path).decode([...])`."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036  # a clone is run without pip, which would have looked
    raise ImportError(f"pipejax: found Python {sys.version.split()[0]} ({sys.executable}); expected 3.11 or newer")

from pipejax.system import environment  # before anything imports JAX: it pins settings

if TYPE_CHECKING:
    from pipejax.config import Config
    from pipejax.inference.answers import Record
    from pipejax.inference.generator import Generator

__all__ = ["Config", "Generator", "Record", "load"]
__version__ = "0.1.0"
__path__.append(f"{__path__[0]}/system/formerly")  # `python -m pipejax.plan` and two others run as they did


def load(path: str | Path, *, best: bool = False, overrides: Sequence[str] = ()) -> "Generator":
    """Opens the newest good step of a checkpoint or run directory for decoding.

    Args:
      path: what `pipejax convert from-hf` or `pipejax train` wrote.
      best: take the best evaluated step.
      overrides: `key=value` settings of the sections grid and decode, data.max_source and data.separator.

    Raises:
      UserError: no such directory, no good step in it, or an override that does not fit.
    """
    from pipejax.inference.loading import load as open_checkpoint  # importing pipejax alone must not start JAX

    for setting in environment.IGNORED:
        warnings.warn(f"{setting}: not followed since `import pipejax`, in the whole program", stacklevel=2)
    return open_checkpoint(path, best=best, overrides=overrides)


def __getattr__(name: str) -> Any:
    """The other public names, imported when they are first asked for."""
    if name == "Config":
        from pipejax.config import Config

        return Config
    if name == "Generator":
        from pipejax.inference.generator import Generator

        return Generator
    if name == "Record":
        from pipejax.inference.answers import Record

        return Record
    raise AttributeError(f"module 'pipejax' has no attribute {name!r}")
