"""The seal of a manifest, written a second time."""

import hashlib
import json
from typing import Any


def seal(body: dict[str, Any]) -> dict[str, Any]:
    """As the format says: SHA-256 of the rest, its keys sorted."""
    rest = {key: value for key, value in body.items() if key != "seal"}
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False)
    return {**rest, "seal": hashlib.sha256(text.encode()).hexdigest()}
