"""Scores of generated rows against the rows of the data, one file a task family. Standard library where it suffices."""
