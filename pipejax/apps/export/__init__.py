"""Exports decoding as files that JAX alone runs: `pipejax export`."""
