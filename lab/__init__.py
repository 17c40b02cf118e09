"""What measures pipejax and is no part of it: the demo, experiments, faults, benchmarks."""

import sys
import traceback
from pathlib import Path
from types import TracebackType

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # some programs here are built on what tests/support has

from pipejax.system import cli, environment


def _ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends `python -m MODULE` with one line if a library is absent."""
    if (code := cli.explain(error, debug=False)) == cli.EXIT_OUR_MISTAKE:
        traceback.print_exception(error)
    raise SystemExit(code)


if sys.argv[0] == "-m":  # the value of argv[0] while Python looks for the module
    sys.excepthook = _ended
    environment.check_platform()
