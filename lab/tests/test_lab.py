"""`python -m lab.MODULE`: user errors end with one line, and internal errors with a traceback."""

import os
import subprocess
import sys
from pathlib import Path

from pipejax.system import cli

ROOT = Path(__file__).parents[2]


def test_internal_error_shows_its_traceback(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import lab\n")
    (package / "mistaken.py").write_text("import json\njson.no_such_function()\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "package.mistaken"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == cli.EXIT_OUR_MISTAKE and "AttributeError" in ended.stderr.splitlines()[-1]
