"""Commands that train, decode and compare."""
