"""T5 encoder-decoders in JAX with a pipelined decoder: `pipejax.load(path).decode([...])`."""

import warnings
from typing import TYPE_CHECKING, Any

from pipejax import environment as environment  # before anything imports JAX: it pins settings

if TYPE_CHECKING:
    from pipejax.generate import Generator

__version__ = "0.1.0"


def load(path: str, **options: Any) -> "Generator":
    """Opens a checkpoint or run directory for decoding; see `pipejax.generate.load`."""
    from pipejax.generate import load as open_checkpoint  # importing pipejax alone must not start JAX

    for setting in environment.IGNORED:
        warnings.warn(f"{setting}: not followed since `import pipejax`, in the whole program", stacklevel=2)

    return open_checkpoint(path, **options)
