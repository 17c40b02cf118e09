"""Programs that measure pipejax and are no part of it: the demo, experiments, faults and benchmarks."""

import sys
import traceback
from pathlib import Path
from types import TracebackType

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # some programs in lab/ import modules of tests/support

from pipejax.system import cli, environment


def _ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends `python -m MODULE` with one line if a library is absent."""
    if (code := cli.explain(error, debug=False)) == cli.EXIT_OUR_MISTAKE:
        traceback.print_exception(error)
    raise SystemExit(code)


if sys.argv[0] == "-m":  # argv[0] has this value while Python looks for the module
    sys.excepthook = _ended
    environment.check_platform()
