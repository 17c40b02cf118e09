"""The peer's side: a process that answers each batch with one line of JSON.

It reads {"source": [[id, ...], ...], "lengths": [n, ...]}, which are sources of one length and the number of tokens of
each answer, and writes {"encode_s": seconds, "decode_s": seconds, "tokens": [[id, ...], ...]} or {"error": line}. After
the model is loaded, its first line is {"versions": {library: version}} or {"error": line}. Other output goes to stderr.
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
        """Decodes greedy answers of these lengths to sources of one length; sources and answers are token ids."""


def serve(load: Callable[[argparse.Namespace], Model], *libraries: str) -> None:
    """Loads the model that the command line names, and answers batches until the input ends.

    Args:
      load: makes the model from `name`, `directory` (in Hugging Face's layout), `threads`, `dtype` and `device`.
      libraries: the libraries whose versions are in the first line.
    """
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)  # a stopped process does not see the end of its input
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    flags = parser.parse_args()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # output of libraries goes to stderr
        try:
            model = load(flags)
        except Exception as error:  # any error: the other side reports it
            say(out, {"error": error_line(error)})
            sys.exit(1)
        say(out, {"versions": {name: importlib.metadata.version(name) for name in libraries}})
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                say(out, model.run(asked["source"], asked["lengths"])._asdict())
            except Exception as error:  # any error, as above
                say(out, {"error": error_line(error)})


def converted(target: Path, convert: Callable[[Path], object]) -> Path:
    """Returns `target`, after `convert` has written it if it was missing. An interrupted conversion is repeated."""
    if not target.exists():
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        convert(part)
        part.rename(target)
    return target


def say(out: TextIO, value: object) -> None:
    """Writes a value as a line of JSON."""
    out.write(json.dumps(value) + "\n")
    out.flush()


def error_line(error: Exception) -> str:
    """The type and the message of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
