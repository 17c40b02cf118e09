"""Teaches a sequential T5 to write rows, from texts without labels: `pipejax teach`."""
