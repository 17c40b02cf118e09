"""Decodes many files by several processes: `pipejax bulk`."""
