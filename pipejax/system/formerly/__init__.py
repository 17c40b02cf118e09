"""Commands by their former names, as `python -m pipejax.plan`; `pipejax/__init__.py` adds this folder to its path."""
