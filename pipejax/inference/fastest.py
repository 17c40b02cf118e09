"""Which backend is the fastest here."""

import jax

from pipejax.inference import kernels
from pipejax.inference.backends import OWN_KERNEL, XLA, Backend


def fastest() -> Backend:
    """Our own kernels if this machine can have them, XLA otherwise."""
    if kernels.use():
        return OWN_KERNEL
    if jax.default_backend() == "gpu":
        from pipejax.inference import gpu  # importing Pallas takes time

        return gpu.GPU if gpu.use() else XLA
    return XLA
