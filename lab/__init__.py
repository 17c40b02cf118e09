"""What measures pipejax and is no part of it: the demo, experiments, faults, benchmarks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # some programs here are built on what tests/support has

from pipejax.system import cli

cli.explain_imports()
