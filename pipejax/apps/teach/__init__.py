"""Trains a T5 for rows, a small T5 for drafts, or a tagger, on the answers of a checkpoint: `pipejax teach`."""
