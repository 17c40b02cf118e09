"""Decodes many files with several processes: `pipejax bulk`."""
