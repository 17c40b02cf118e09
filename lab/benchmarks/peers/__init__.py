"""The systems that pipejax is compared with, each a process of its own in an environment of its own.

Nothing here but `process` imports pipejax or JAX, as these environments have neither. `make venv-peers` builds them.
"""
