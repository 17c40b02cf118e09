"""Kernels for CPUs and GPUs that are used in place of XLA's where they are faster. The core does not depend on them."""
