"""A second implementation of the seal of a manifest."""

import hashlib
import json
from typing import Any


def seal(body: dict[str, Any]) -> dict[str, Any]:
    """Seals a manifest as the format defines: by the SHA-256 of the other entries, with sorted keys."""
    rest = {key: value for key, value in body.items() if key != "seal"}
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False)
    return {**rest, "seal": hashlib.sha256(text.encode()).hexdigest()}
