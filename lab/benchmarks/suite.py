"""The tests of the suite that run on any device, on the one that is here, with a record of each as soon as it ends.

    python -m lab.benchmarks.suite --json OUT [ARGUMENTS of pytest]

The suite pretends eight CPU devices; with `VARIABLE` in the environment it leaves JAX the device that is here. Warnings
are no errors then: the versions of this machine are not those that the suite was written for.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from lab.benchmarks.systems import machine, save
from pipejax.system import cli

VARIABLE = "PIPEJAX_TEST_DEVICE"  # read by conftest.py
# In order of worth. A GPU's default of products in float32 is TF32; these tests ask for more.
TESTS = ("tests/test_gpu.py", "tests/test_step_decoder.py", "tests/test_attention.py", "tests/test_t5.py")


def main(argv: Sequence[str]) -> int:
    """Runs pytest, prints what it prints, writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.suite", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("arguments", nargs="*", help=f"of pytest, after --; none: {' '.join(TESTS)}")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    os.environ[VARIABLE] = "here"
    import jax
    import pytest

    jax.config.update("jax_default_matmul_precision", "highest")  # JAX is imported: it no longer reads its variable

    records = Records(flags.json)
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", "--tb=short"]
    code = int(pytest.main([*options, *(flags.arguments or TESTS)], plugins=[records]))
    records.save()
    return code


class Records:
    """A plugin of pytest that writes down each test."""

    def __init__(self, path: str | None) -> None:
        """`path`: where to, if anywhere."""
        self.path, self.results = path, list[dict[str, Any]]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest after each phase of a test."""
        if report.when == "call" or report.outcome != "passed":  # a set-up that failed or skipped
            result = {"name": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            if report.outcome == "failed":
                result["error"] = str(report.longrepr)[-1000:]
            self.results.append(result)
            self.save()

    def save(self) -> None:
        """Writes what there is."""
        if self.path:
            save(self.path, {"results": self.results, "machine": machine(1)})


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
