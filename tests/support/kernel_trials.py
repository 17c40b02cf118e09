"""Functions that replace trials of kernels, and run in child processes of `pipejax.kernels.child_trials`."""

import os
import time

from pipejax.kernels import child_trials


def agree(*numbers: int) -> str:
    """A trial that passes; other output surrounds its result."""
    print("a library greets")
    return ""


def describe(*numbers: int) -> str:
    """A trial that fails, with its arguments and settings as the reason."""
    return f"{numbers} {os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE')} {'jax' in __import__('sys').modules}"


def end_by(number: int) -> str:
    """A trial whose process ends by a signal, as by an invalid address or for lack of memory."""
    os.kill(os.getpid(), number)
    return "the process went on"


def exit_at_once(code: int) -> str:
    """A trial whose process exits without a result."""
    os._exit(code)


def hang(seconds: int) -> str:
    """A trial that takes long."""
    time.sleep(seconds)
    return ""


def fail(lacks_memory: int) -> str:
    """A trial that raises an error."""
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory" if lacks_memory else "cannot lower\na second line")


def without_gpu() -> str:
    """A trial that a second process cannot make."""
    child_trials.require_gpu()
    return ""
