"""Measures how much the rows of a target depend on each other, and how much of that a Δt leaves visible."""
