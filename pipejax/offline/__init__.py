"""Offline decoding: files of sources in, files of records out; evaluation, and resume of interrupted outputs."""
