"""`python -m pipejax.picture`: now `pipejax picture`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "picture")
    runpy.run_module("pipejax", run_name="__main__")
