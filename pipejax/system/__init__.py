"""Code that does not depend on T5: commands, files, streams, processes, and JAX's settings."""

from typing import Any

VERSION = "0.1.0"  # the version of pipejax
Tree = Any  # a pytree whose structure only its owner knows: parameters, a strategy's state, a cache, or their shardings
