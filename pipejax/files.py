"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces a file whole, or leaves it as it was."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}-", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
