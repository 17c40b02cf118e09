"""Prepares published data sets, and counts the examples, words and tokens of a task: `pipejax data`."""
