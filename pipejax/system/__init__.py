"""Everything that does not depend on T5: commands, files, streams, processes, and JAX's settings."""

from typing import Any

VERSION = "0.1.0"  # of pipejax
Tree = Any  # a pytree whose nodes only its owner knows: parameters, a strategy's state, a cache, or their shardings
