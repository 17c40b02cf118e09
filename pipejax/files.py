"""Files: what lies at a path, and writing whole or not at all."""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Literal

from pipejax.errors import UserError


def look(path: str | Path, where: str = "") -> Literal["", "file", "directory"]:
    """What lies at a path, through links: "" for nothing, "file" for all that is no directory, pipes and devices too.

    Path's own questions raise an OSError on one Python and say "nothing" on another if they are not answered.

    Raises:
      UserError: the path may not be looked at, is too long, or cannot be one; it begins with `where`.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return ""
        raise UserError(f"{where}{' ' if where else ''}{path}: cannot be looked at ({error.strerror})") from error
    except ValueError as error:  # a NUL, or characters that no file name has
        raise UserError(f"{where}{' ' if where else ''}{str(path)!r}: found no path ({error}); expected one") from error
    return "directory" if stat.S_ISDIR(mode) else "file"


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
