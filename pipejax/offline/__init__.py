"""Offline decoding: a file of sources in, a file of records out; evaluation; and resuming interrupted outputs."""
