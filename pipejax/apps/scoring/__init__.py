"""Scores a file of predictions: `pipejax metrics`."""
