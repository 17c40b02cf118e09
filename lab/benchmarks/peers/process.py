"""The benchmark's side of a peer: a system whose process runs only during its turns."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lab.benchmarks.systems import Rows, Run
from pipejax.grid import sequential_steps

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENTS = ROOT / "build" / "peers"  # as in the Makefile
PATIENCE = 1200.0  # seconds until a model is loaded, or a batch answered


class Place(NamedTuple):
    """The module and the Python environment of a peer."""

    module: str  # of this package
    environment: str = ""  # folder in `ENVIRONMENTS`; "" or a missing folder: this Python
    batches: bool = True  # whether it decodes a batch at once, and not one example after the other


PEERS = {
    **dict.fromkeys(("hf", "hf-bf16", "hf-int8", "hf-compiled"), Place("hugging_face")),
    **dict.fromkeys(("ct2-fp32", "ct2-int8", "ct2-int8-packed"), Place("ct2", "ct2")),
    **dict.fromkeys(("openvino-fp32", "openvino-int8"), Place("openvino", "openvino")),
    **dict.fromkeys(("onnx-fp32", "onnx-int8"), Place("onnx", "onnx")),
    **dict.fromkeys(("llama-fp32", "llama-int8"), Place("llama", "llama", batches=False)),
}


def python_of(name: str) -> str:
    """The path of a peer's interpreter."""
    environment = PEERS[name].environment
    own = ENVIRONMENTS / environment / "bin" / "python"
    return str(own) if environment and own.exists() else sys.executable


def torch_device() -> str:
    """PyTorch's name for the kind of device that JAX uses."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


class Process:
    """A peer's process. It is stopped between its turns, so that its threads do not spin during the turns of others."""

    def __init__(self, name: str, command: list[str], log: Path, *, batches: bool = True) -> None:
        """Starts the command and waits until its model is loaded. Its other output goes to the file `log`.

        Raises:
          RuntimeError: the model was not loaded.
        """
        self.name, self.log, self.batches = name, log, batches
        with log.open("w") as said:
            environment = os.environ | {"HF_HUB_OFFLINE": "1"}
            pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=said, env=environment, **pipe)
        try:
            self.versions: dict[str, str] = self._read()["versions"]
        except BaseException:
            self.close()
            raise

    def run(self, source: np.ndarray, rows: Rows) -> Run:
        """See `System`; a peer without batches answers the first example, and its time counts for each example."""
        times = 1 if self.batches else len(rows)
        lengths = [sequential_steps(r) for r in rows[: len(rows) // times]]
        found = self.answer(source[: len(lengths)].tolist(), lengths)
        return Run(times * found["encode_s"], times * found["decode_s"])

    def answer(self, source: list[list[int]], lengths: list[int]) -> Any:
        """Sends a batch; returns the line that `worker` writes for it.

        Raises:
          AssertionError: the answers have other lengths.
          RuntimeError: the peer failed.
        """
        assert self.process.stdin
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"source": source, "lengths": lengths}) + "\n")
        self.process.stdin.flush()
        found = self._read()
        check_lengths(found["tokens"], lengths)
        return found

    def steps(self, rows: Rows) -> int:
        """The decoder steps of the longest answer."""
        return max(map(sequential_steps, rows))

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()

    def _read(self) -> Any:
        """Reads the next line, and stops the process."""
        assert self.process.stdout
        late = threading.Timer(PATIENCE, self.process.kill)
        late.start()
        line = self.process.stdout.readline()
        late.cancel()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)  # it may still be writing the reason
            last = (self.log.read_text(errors="replace").splitlines() or ["it wrote nothing"])[-1]
            raise RuntimeError(f"the process ended ({last})")
        self.process.send_signal(signal.SIGSTOP)
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found


@contextlib.contextmanager
def peer(name: str, directory: Path, *, threads: int, dtype: str = "float32") -> Iterator[Process]:
    """A context with the process of one of `PEERS`, for a model of `systems.write`. `dtype`: for Hugging Face only."""
    place = PEERS[name]
    command = [python_of(name), "-m", f"{__package__}.{place.module}", name, str(directory)]
    command += ["--threads", str(threads), "--dtype", dtype, "--device", torch_device()]
    process = Process(name, command, directory.parent / f"{name}.log", batches=place.batches)
    try:
        yield process
    finally:
        process.close()


def check_lengths(found: list[list[Any]], wanted: list[int]) -> None:
    """Raises an AssertionError if an answer does not have its wanted length."""
    assert [len(x) for x in found] == wanted, f"answers of {[len(x) for x in found]} tokens, not {wanted}"
