"""The systems that pipejax is compared with. Each runs in a separate process and in its own Python environment.

Only `process` imports pipejax and JAX: the environments of the peers have neither. `make venv-peers` builds them.
"""
