"""The side of a peer: a process that answers batches, one line of JSON for each.

It reads {"source": [[id, ...], ...], "lengths": [n, ...]}, sources of one length and the tokens that each answer is to
have, and writes {"encode_s": seconds, "decode_s": seconds, "tokens": [[id, ...], ...]} or {"error": line}. Its first
line, once the model is loaded, is {"versions": {library: version}} or {"error": line}. Other output goes to stderr.
"""

import argparse
import ctypes
import importlib.metadata
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class Answer(NamedTuple):
    """The answers of a batch, and the seconds that they took."""

    encode_s: float
    decode_s: float
    tokens: list[list[int]]


class Model(Protocol):
    """A loaded peer."""

    def run(self, source: list[list[int]], lengths: Sequence[int]) -> Answer:
        """Greedy answers of these lengths to sources of one length, all token ids."""


def serve(load: Callable[[argparse.Namespace], Model], *libraries: str) -> None:
    """Loads the model that the command line names, and answers until its input ends.

    Args:
      load: makes the model of `name`, `directory` (of Hugging Face's layout), `threads`, `dtype` and `device`.
      libraries: that the first line gives the versions of.
    """
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)  # a process that is stopped would not see its input end
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    flags = parser.parse_args()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # libraries print
        try:
            model = load(flags)
        except Exception as error:  # of whatever kind: the other side reports it
            say(out, {"error": error_line(error)})
            sys.exit(1)
        say(out, {"versions": {name: importlib.metadata.version(name) for name in libraries}})
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                say(out, model.run(asked["source"], asked["lengths"])._asdict())
            except Exception as error:  # likewise
                say(out, {"error": error_line(error)})


def converted(target: Path, convert: Callable[[Path], object]) -> Path:
    """`target`, which `convert` has written unless it was there already; one that was cut off does not count."""
    if not target.exists():
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        convert(part)
        part.rename(target)
    return target


def say(out: TextIO, value: object) -> None:
    """Writes a line."""
    out.write(json.dumps(value) + "\n")
    out.flush()


def error_line(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
