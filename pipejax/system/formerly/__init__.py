"""Commands by their former names, `python -m pipejax.plan` and its like: `pipejax/__init__.py` makes them be found."""
