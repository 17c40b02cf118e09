"""Exports decoding as files that need only JAX: `pipejax export`."""
