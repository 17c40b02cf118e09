"""Runs the tests that work on any device on this machine's device, and records each test as soon as it ends.

    python -m lab.benchmarks.suite --json OUT [ARGUMENTS of pytest]

The suite usually simulates eight CPU devices; with `VARIABLE` in the environment JAX uses the device of this machine.
Warnings are no errors then, since the versions on this machine may differ from the pinned versions.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from lab.benchmarks.systems import machine, save
from pipejax.system import cli

VARIABLE = "PIPEJAX_TEST_DEVICE"  # read by conftest.py
# In order of importance. On a GPU, products in float32 are computed in TF32 by default; these tests need float32.
TESTS = ("tests/test_gpu.py", "tests/test_step_decoder.py", "tests/test_attention.py", "tests/test_t5.py")


def main(argv: Sequence[str]) -> int:
    """Runs pytest, prints its output, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.suite", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    parser.add_argument("arguments", nargs="*", help=f"arguments of pytest, after -- (default: {' '.join(TESTS)})")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    os.environ[VARIABLE] = "here"
    import jax
    import pytest

    # JAX is imported already, and no longer reads its environment variable.
    jax.config.update("jax_default_matmul_precision", "highest")

    records = Records(flags.json)
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", "--tb=short"]
    code = int(pytest.main([*options, *(flags.arguments or TESTS)], plugins=[records]))
    records.save()
    return code


class Records:
    """A plugin of pytest that records each test."""

    def __init__(self, path: str | None) -> None:
        """Starts without records. `path`: the file for the records, or None."""
        self.path, self.results = path, list[dict[str, Any]]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Records a phase of a test; pytest calls this method after each phase."""
        if report.when == "call" or report.outcome != "passed":  # a set-up that failed or was skipped
            result = {"name": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            if report.outcome == "failed":
                result["error"] = str(report.longrepr)[-1000:]
            self.results.append(result)
            self.save()

    def save(self) -> None:
        """Writes all records so far."""
        if self.path:
            save(self.path, {"results": self.results, "machine": machine(1)})


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
