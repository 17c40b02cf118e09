"""The directory of the real data sets and of T5's tokenizer, from the environment variable PIPEJAX_DATA."""

import os
from pathlib import Path

from pipejax.system.errors import UserError


def directory() -> Path:
    """Returns the directory that PIPEJAX_DATA names; raises a UserError if it is no directory."""
    named = os.environ.get("PIPEJAX_DATA", "")
    found = Path(named or "absent")
    if not found.is_dir():
        raise UserError("PIPEJAX_DATA", found=f"{named!r}", expected="the directory of the data sets")
    return found
