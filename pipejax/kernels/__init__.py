"""Kernels for CPUs and GPUs that replace XLA's where they are faster. The core works without them."""
