"""Verifies every step of a run directory: `pipejax checkpoint verify`."""
