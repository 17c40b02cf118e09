"""`python -m pipejax.plan`: now `pipejax plan`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "plan")
    runpy.run_module("pipejax", run_name="__main__")
