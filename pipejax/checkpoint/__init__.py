"""Checkpoints on disk.

A run directory, of which a converted checkpoint is one at step 0:

    config.json            the resolved config, for people
    tokenizer/             the tokenizer's files, if there is one
    checkpoints/STEP/      params, state (absent in converted checkpoints) and manifest
    best/STEP/             params and manifest of the best evaluation
    metrics.jsonl          the log

`pipejax checkpoint verify DIR` checks every step of one.
"""

from pipejax.checkpoint.arrays import check_place
from pipejax.checkpoint.best import Best
from pipejax.checkpoint.manifest import Damaged
from pipejax.checkpoint.run import open_run, require_free, save_params
from pipejax.checkpoint.store import Restored, Store

__all__ = ["Best", "Damaged", "Restored", "Store", "check_place", "open_run", "require_free", "save_params"]
