"""Trials of kernels for GPUs in a child process, whose results are compared with XLA's.

After an invalid address, CUDA refuses all further work of the process, so kernels are not tried in this process. The
child ends before the parent uses the GPU, if the parent has not used it yet (`system.trials.try_kernels_early`).
"""

import functools
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from pipejax import registry
from pipejax.system.errors import first_line, out_of_memory
from pipejax.system.strict_json import loads
from pipejax.system.trials import PACKAGE, Trial, Verdict

logger = logging.getLogger(__name__)

OWN, XLA = "pipejax's kernels", "XLA's kernels"  # the choices of a trial of kernels
SECONDS = 300.0  # the longest time of a child process
# Signals from other processes or the system, for example for lack of memory. They are no evidence against a kernel.
OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
_CHILD = "import sys; from pipejax.kernels import child_trials; child_trials.report(*sys.argv[1:])"


class Prevented(Exception):
    """Raised by a trial that could not be made. Its verdict is not kept."""


@functools.cache
def refusal(name: str, place: str, *arguments: int) -> str:
    """Returns the reason why this process cannot use kernels on its GPU; "" if a trial found that it can.

    Args:
      name: the name of the trial.
      place: the function that tries the kernels, "MODULE:NAME". It returns the reason, or "", and runs in a child.
      arguments: the arguments of the function, which JSON can express.
    """

    def decide() -> Verdict:
        logger.info(f"trying pipejax's {name} in a separate process, once for this GPU and driver (up to a minute)")
        return run_in_child(place, arguments)

    found = Trial(name, json.dumps([place, *arguments])).verdict((OWN, XLA), decide)
    return "" if found.choice == OWN else found.reason


def run_in_child(place: str, arguments: Sequence[int], seconds: float = SECONDS) -> Verdict:
    """Tries kernels in a child process, which does not reserve the memory of the GPU; see `refusal`.

    Returns:
      OWN if the function returned "", otherwise XLA with the reason, also if the process crashed or took too long.
    """
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    command = [sys.executable, "-c", _CHILD, place, json.dumps(arguments)]
    try:
        done = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(XLA, f"their trial took more than {seconds:.0f} s")
    except OSError as error:
        return Verdict(XLA, f"the process of their trial could not be started ({error.strerror})", lasts=False)
    if done.returncode < 0:
        number = signal.Signals(-done.returncode)
        return Verdict(XLA, f"the process of their trial ended by {number.name}", lasts=number not in OUTSIDE)
    try:
        found = loads(done.stdout.strip().splitlines()[-1])
        return Verdict(XLA if found["reason"] else OWN, found["reason"] or "results agree with XLA's", found["lasts"])
    except (IndexError, KeyError, TypeError, ValueError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Verdict(XLA, f"the process of their trial failed ({lines[-1][:200]})", lasts=False)


def report(place: str, arguments: str) -> None:
    """Tries kernels and prints the outcome as JSON: the program of the child process of `run_in_child`."""
    try:
        reason, lasts = registry.find(place)(*loads(arguments)), True
    except Prevented as error:
        reason, lasts = first_line(error), False
    # Compilers and CUDA raise errors of many types; with any of them, the parent works without the kernels.
    except Exception as error:
        reason, lasts = first_line(error)[:200], not out_of_memory(error)
    print(json.dumps({"reason": reason, "lasts": lasts}), flush=True)


def require_gpu() -> None:
    """Raises `Prevented` if this process cannot use a GPU, as when another process has it for itself."""
    import jax

    try:
        found = jax.default_backend()
    except RuntimeError as error:
        raise Prevented(f"a second process cannot use the GPU ({first_line(error)[:200]})") from error
    if found != "gpu":
        raise Prevented("a second process cannot use the GPU")
