"""Checkpoints on disk.

A run directory, of which a converted checkpoint is one at step 0:

    config.json            the resolved config, for people
    tokenizer/             the tokenizer's files, if there is one
    checkpoints/STEP/      params, state (absent in converted checkpoints) and manifest
    best/STEP/             params and manifest of the best evaluation
    metrics.jsonl          the log

`pipejax checkpoint verify DIR` checks every step of one.

Who judges a step: `store.Store.restore` and `verify`, in this order,

    manifest.check            the seal of the manifest, and its form
    trouble.reading           whether what cannot be read is damaged, or only cannot be read just now
    manifest.check_template   whether it holds the arrays that are wanted
    fingerprint.difference    the content of every array against the manifest

and `Store.newest` passes over what is damaged, or sets it aside.
"""

from pipejax.checkpoint.arrays import check_place
from pipejax.checkpoint.best import Best
from pipejax.checkpoint.manifest import Damaged
from pipejax.checkpoint.run import open_run, require_free, save_params
from pipejax.checkpoint.store import Restored, Store

__all__ = ["Best", "Damaged", "Restored", "Store", "check_place", "open_run", "require_free", "save_params"]
