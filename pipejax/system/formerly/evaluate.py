"""`python -m pipejax.evaluate`: now `pipejax evaluate`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "evaluate")
    runpy.run_module("pipejax", run_name="__main__")
