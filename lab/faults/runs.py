"""The processes of the tiny run, and the comparison of two runs.

Commands run in children of a process that has imported the libraries, which halves their cost. Apart from this, a child
is an ordinary process: it is killed, and ends, independently of the others.
"""

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from lab.faults import events
from lab.faults.events import Trap
from support.tiny_run import EVERY, STEPS, committed, metrics, prepare, steps_made

__all__ = ["EVERY", "STEPS", "committed", "metrics", "prepare", "steps_made"]

# multiprocessing polls all children when it starts one, and a child's exit code can be read only once.
_asking = threading.Lock()


@dataclasses.dataclass
class Command:
    """A running command in a separate process."""

    process: ForkServerProcess
    said_in: Path

    def running(self) -> bool:
        """Whether the command still runs."""
        with _asking:
            return self.process.is_alive()

    def send(self, number: int) -> None:
        """Sends a signal if the command still runs."""
        with _asking, contextlib.suppress(ProcessLookupError):
            if self.process.is_alive() and self.process.pid:
                os.kill(self.process.pid, number)

    def end(self, timeout: float = 1800.0) -> int:
        """Waits for the command; returns its exit code, negative for a signal as in subprocess.

        Raises:
          TimeoutError: the command hangs; it is killed before.
        """
        wait([self.process.sentinel], timeout)
        with _asking:
            code = self.process.exitcode
            if code is None:
                self.process.kill()
                raise TimeoutError(f"a command hung for {timeout:.0f} s: {self.said()[-3:]}")
        return code

    def said(self) -> list[str]:
        """The lines of the command on standard error."""
        return self.said_in.read_text(errors="replace").splitlines()


class Commands:
    """Starts commands."""

    def __init__(self, scratch: Path) -> None:
        """Starts the process that imports the libraries of all commands and forks them."""
        self.scratch, self.count = scratch, 0
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "compiled").mkdir(mode=0o700, exist_ok=True)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(scratch / "compiled"))
        # Each program compiles once for all runs of this package.
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.context = multiprocessing.get_context("forkserver")
        needed = ["pipejax.training.loop", "pipejax.convert.huggingface", "lab.faults.runs", "train", "decode"]
        needed += ["transformers.models.auto.tokenization_auto", "sentencepiece"]
        self.context.set_forkserver_preload(needed)
        self.library: Path | None = None
        self.blind = ""  # the reason why file events cannot be recorded
        try:
            self.library = events.build(scratch)
            os.environ["LD_PRELOAD"] = str(self.library)
            multiprocessing.forkserver.ensure_running()  # all commands are forked from this process
        except events.CannotWatch as reason:
            self.blind = str(reason)
        finally:
            os.environ.pop("LD_PRELOAD", None)

    def start(
        self,
        name: str,
        *argv: str,
        devices: int = 1,
        cold: bool = False,
        trap: Trap | None = None,
        files: int | None = None,
    ) -> Command:
        """Starts the `main` of a module with these arguments.

        Args:
          name: `train`, `decode`, `pipejax.convert.__main__` or another module with a `main`.
          argv: the arguments.
          devices: the number of fake CPU devices.
          cold: whether everything compiles, instead of using compiled programs of earlier runs.
          trap: records the file events, or kills the process at one.
          files: the number of files that it may hold open.
        """
        watch = (trap, self.library) if trap and self.library else None
        with _asking:
            self.count += 1
            said = self.scratch / f"{self.count}.err"
            said.touch()
            process = self.context.Process(target=_child, args=(name, argv, str(said), devices, cold, watch, files))
            process.start()
        return Command(process, said)

    def share(self, name: str, scratch: Path, trials: int, *, workers: int = 2) -> list[dict[str, Any]]:
        """Splits trials among processes that run a module's `main` with SCRATCH FIRST LAST OUT; returns the results."""
        bounds = [trials * number // workers for number in range(workers + 1)]
        started = []
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            out = scratch / f"{name}-{number}.json"
            started.append((self.start(name, str(scratch), str(first), str(last), str(out)), out))
        ended = [(command.end(), command.said()[-3:]) for command, _ in started]
        assert all(code == 0 for code, _ in ended), ended
        return [json.loads(out.read_text()) for _, out in started]

    def train(
        self,
        config: Path,
        workdir: Path,
        *settings: str,
        flags: Sequence[str] = (),
        cold: bool = False,
        devices: int = 1,
        trap: Trap | None = None,
        files: int | None = None,
    ) -> Command:
        """Starts train.py."""
        assigned = [f"--set={setting}" for setting in settings]
        arguments = [f"--config={config}", f"--workdir={workdir}", *assigned, *flags]
        return self.start("train", *arguments, cold=cold, devices=devices, trap=trap, files=files)

    def pair(
        self,
        config: Path,
        workdir: Path,
        *settings: str,
        heartbeat: int = 10,
        traps: Sequence[Trap | None] = (None, None),
    ) -> list[Command]:
        """Starts train.py in two processes of one run."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}"
        several = [f"--coordinator={place}", "--processes=2", f"--heartbeat={heartbeat}"]
        return [
            self.train(config, workdir, *settings, flags=[*several, f"--process-id={i}"], trap=traps[i]) for i in (0, 1)
        ]


def speak_into(said: str) -> None:
    """Redirects standard error of this process to a file, and standard output to nowhere."""
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(handle, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)


def _child(
    name: str,
    argv: Sequence[str],
    said: str,
    devices: int,
    cold: bool,
    watch: tuple[Trap, Path] | None,
    files: int | None,
) -> None:
    speak_into(said)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import importlib

    import jax

    from pipejax.system import cli

    jax.config.update("jax_num_cpu_devices", devices)
    # The number of XLA's threads: with one for each device, devices that wait for each other starve.
    os.environ["NPROC"] = str(2 * devices)
    if cold:
        jax.config.update("jax_enable_compilation_cache", False)
    main = importlib.import_module(name).main
    if watch:
        events.arm(*watch)
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    cli.run(main, list(argv))


def saves_under_way(workdir: Path) -> list[Path]:
    """The directories of saves that are not committed."""
    return [*workdir.glob("checkpoints/*.orbax-checkpoint-tmp*"), *workdir.glob("best/*.orbax-checkpoint-tmp*")]


def state_word(workdir: Path, step: int, kind: str = "checkpoints") -> str:
    """A digest of the arrays of a step, including the optimizer's if it has them, after they are read and verified."""
    from pipejax.checkpoint.fingerprint import digest
    from pipejax.checkpoint.store import Store

    store = Store(workdir / kind)
    store.verify(step)
    arrays = store.describe(step).arrays
    return digest({f"{item}/{path}": value for item, prints in arrays.items() for path, value in prints.items()})


def outcome(workdir: Path) -> dict[str, Any]:
    """The outcome in which two runs must agree: last state, best parameters, last params_fp, and the whole log."""
    lines, steps = metrics(workdir), committed(workdir)
    return {
        "best": {step: state_word(workdir, step, "best") for step in committed(workdir, "best")},
        "step": steps[-1] if steps else 0,
        "state": state_word(workdir, steps[-1]) if steps else "",
        "params_fp": next((line["params_fp"] for line in reversed(lines) if "params_fp" in line), ""),
        "log": lines,
    }


def wait_for(condition: Any, command: Command, timeout: float = 120.0) -> bool:
    """Whether the condition became true while the command ran; it is tested about a thousand times a second."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        if not command.running():
            return bool(condition())
        time.sleep(0.001)
    return False


def fresh(directory: Path) -> Path:
    """Removes anything at the path; returns the path."""
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def copy(directory: Path, target: Path) -> None:
    """Copies a directory, and replaces the target."""
    shutil.copytree(directory, fresh(target), symlinks=True)
