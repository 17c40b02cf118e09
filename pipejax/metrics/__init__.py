"""Scores of generated rows against the rows of the data, a file for each family of tasks."""
