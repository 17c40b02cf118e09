"""Compares runs by their logs, and methods and drafters by the same examples of a split."""
