"""Checkpoints on disk.

A run directory has these files; a converted checkpoint is a run directory whose only step is 0:

    config.json            the resolved config, for people to read
    tokenizer/             the tokenizer's files, if the run has a tokenizer
    checkpoints/STEP/      params, state (absent in converted checkpoints) and manifest
    best/STEP/             params and manifest of the step with the best evaluation
    metrics.jsonl          the log

A save proceeds in this order, so that a crash at any point leaves every earlier step usable:

    1. fingerprint the arrays, and write them to STEP.orbax-checkpoint-tmp in the background
    2. write the manifest, which holds the fingerprints and the digests of the small files
    3. sync all files, rename the directory to STEP, and sync the rename (the commit)
    4. remove older steps that are not kept

`pipejax checkpoint verify DIR` checks every step of a run directory.

`store.Store.restore` and `Store.verify` check a step with these functions, in this order:

    manifest.check_manifest       the seal and the form of the manifest
    manifest.check_template       whether the step has the arrays that the caller wants (only in `restore`)
    trouble.reading               whether a file that cannot be read is damaged, or only unreadable at the moment
    fingerprint.first_difference  whether the content of every array matches the manifest

`Store.newest` skips damaged steps, or renames them to corrupt-STEP.
"""

from pipejax.checkpoint.arrays import check_place
from pipejax.checkpoint.manifest import Damaged
from pipejax.checkpoint.run import (
    CONVERSION,
    check_beside,
    open_auxiliary,
    open_run,
    report_conversion,
    require_free,
    save_params,
    tokenizer_of,
)
from pipejax.checkpoint.store import Best, Restored, Store

__all__ = [
    "CONVERSION",
    "Best",
    "Damaged",
    "Restored",
    "Store",
    "check_beside",
    "check_place",
    "open_auxiliary",
    "open_run",
    "report_conversion",
    "require_free",
    "save_params",
    "tokenizer_of",
]
