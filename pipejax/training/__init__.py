"""From a config to a run directory: the loop, a step of it, the optimizer, what is logged, what it will cost."""
