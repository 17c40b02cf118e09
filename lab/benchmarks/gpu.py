"""Runs all measurements on an NVIDIA GPU in 280 seconds.

    lab/benchmarks/gpu.sh [--rehearse] [--parts NAME,...] [--seconds N] [FOLDER]

Each part of `PARTS` is a process of `lab.benchmarks.gpu_parts`. All parts compile at once, one for each processor, and
fill the cache of compiled programs. Only one part measures at a time: of the parts that wait for the device, the first
in the order of `PARTS` gets it. A quiet part, whose times depend on the host, waits until no part compiles, but at most
for half of the time. A part that has used its seconds on the device, or that still runs when the time is over, is
ended, and the summary reports it.

FOLDER is $OUT by default, or runs/gpu. FOLDER/summary.json is written again after each result, and
`python -m lab.benchmarks.gpu_tables FOLDER/summary.json` makes the tables of docs/gpu.md from it. --rehearse runs the
same parts on a CPU with tiny sizes; its figures mean nothing. The exit status is 1 if a part failed or was cut off, and
2 if there is no GPU. The program needs only the standard library.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lab.benchmarks import gpu_tables, wheels

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 280
ENDING = 6.0  # seconds for ending all processes and writing the summary
LOG = 3000  # characters of the end of a part's log that are kept
NO_GPU = 3  # exit code of a part that found no GPU


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the run: the measurements of one process."""

    name: str
    seconds: float  # the longest time for which it may use the device
    about: str
    quiet: bool = False  # whether its times depend on the host, so that it waits for the compilers


PARTS = (  # in order of importance
    Part("train", 25, "a training step in the paper's setting"),
    Part("attention", 30, "errors and times of attention"),
    Part("decode", 50, "decoding steps with CUDA graphs, own kernels and XLA's", quiet=True),
    Part("launch", 15, "a decode in one launch", quiet=True),
    Part("large", 25, "a training step of T5-Large"),
    Part("long", 15, "a training step with sources of 16,384 tokens"),
    Part("auto", 20, "a training step with train.remat=auto"),
    Part("transformers", 30, "a training step of transformers"),
    Part("graph", 15, "a decoding step in PyTorch, in a CUDA graph", quiet=True),
    Part("agreement", 10, "own kernels of decoding compared with XLA's"),
)


Result = dict[str, Any]  # figures by name


class Case(NamedTuple):
    """A measurement: `compile` returns the function that measures."""

    name: str
    compile: Callable[[], Callable[[], Result | list[Result]]]
    timed: bool = True  # whether it needs the device alone


class Channel:
    """The connection of a part to the run. Without one, messages are printed, and parts do not wait for the device."""

    def __init__(self, number: int | None) -> None:
        """`number`: the number of the file descriptor; None: there is no connection."""
        self._connection = None if number is None else Connection(number)

    def send(self, **message: Any) -> None:
        """Sends a message; see `Running.read`."""
        if self._connection:
            self._connection.send_bytes(json.dumps(message).encode())
        else:
            print(json.dumps(message), flush=True)

    @contextlib.contextmanager
    def turn(self) -> Iterator[int]:
        """Waits for the device and holds it during the block; yields the number of other parts that compile then."""
        if not self._connection:
            yield 0
            return
        self.send(asks=True)
        others = int(self._connection.recv_bytes())
        try:
            yield others
        finally:
            self.send(asks=False)


class Running:
    """The process of a part, and its record in the summary."""

    def __init__(self, part: Part, command: Sequence[str], variables: dict[str, str]) -> None:
        """Starts the process. `command`: the arguments of Python; the number of a file descriptor is appended."""
        self.part, self.record = part, record_of(part, "running")
        self.compiling, self.asks = True, False  # a part compiles until it first asks for the device
        self.code: int | None = None  # its exit code, which it sends as its last message
        self.since, self.used = 0.0, 0.0  # start of its use of the device, or 0; seconds of earlier uses
        self.began, self.log = time.time(), tempfile.TemporaryFile()  # noqa: SIM115 - `finish` closes it
        self.connection, other = Pipe()
        number = other.fileno()
        self.process = subprocess.Popen(
            [sys.executable, *command, str(number)],
            cwd=ROOT,
            env=variables,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[number],
            process_group=0,  # so that processes that it starts end with it
        )
        other.close()

    def read(self) -> bool:
        """Reads a message into the record; returns whether the process still runs."""
        try:
            message = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return False
        if "asks" in message:
            self.compiling, self.asks = False, message["asks"]
            if self.since:
                self.used, self.since = self.used + time.time() - self.since, 0.0
        self.code = message.get("code", self.code)
        self.record["results"] += message.get("results", [])
        self.record |= {key: message[key] for key in ("device", "skipped") if key in message}
        return True

    def begin_turn(self, others: int) -> None:
        """Lets the part measure. `others`: the number of other parts that compile."""
        self.asks, self.since = False, time.time()
        with contextlib.suppress(OSError):  # the process has just ended
            self.connection.send_bytes(str(others).encode())

    @property
    def left(self) -> float:
        """The seconds for which the part may still use the device."""
        return self.part.seconds - self.used - (time.time() - self.since if self.since else 0.0)

    @property
    def state(self) -> str:
        """The state of the part, as text for the summary."""
        return "measuring" if self.since else "waiting for its turn" if self.asks else "compiling"

    def finish(self, cut: str = "") -> None:
        """Completes the record of an ended process. `cut`: the reason why it was ended; "": it ended by itself."""
        code = self.process.returncode if self.code is None else self.code
        status = "cut off" if cut else "failed" if code else "skipped" if "skipped" in self.record else "done"
        if any("error" in result for result in self.record["results"]) and status == "done":
            status = "failed"
        self.log.seek(max(self.log.seek(0, os.SEEK_END) - LOG, 0))
        self.record |= {"status": status, "code": code, "log": self.log.read().decode(errors="replace")}
        self.record |= {"seconds": time.time() - self.began, "device_s": self.part.seconds - self.left}
        if cut:
            self.record["cut"] = cut
        self.log.close()
        self.connection.close()


def run(
    parts: Sequence[Part],
    save: Callable[[list[dict[str, Any]]], None],
    command: Callable[[Part], Sequence[str]],
    variables: dict[str, str],
    *,
    seconds: float,
    at_once: int,
) -> list[dict[str, Any]]:
    """Runs the parts for at most `seconds` seconds; returns their records.

    Args:
      parts: in order of importance.
      save: called with the records whenever they have changed.
      command: gives the arguments of Python for a part.
      variables: the environment of the processes.
      seconds: when all parts are ended, counted from now.
      at_once: the number of processes that may run at the same time.
    """
    began, waiting, running = time.time(), list(parts), list[Running]()
    records = {part.name: record_of(part, "not started") for part in parts}

    def finish(which: Sequence[Running], why: Callable[[Running], str]) -> None:
        reasons = [why(each) for each in which]
        for each in (each for each, reason in zip(which, reasons, strict=True) if not reason):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it closes its connection shortly before it ends
                each.process.wait(2.0)
        end([each.process for each in which])
        for each, reason in zip(which, reasons, strict=True):
            each.finish(reason)
            running.remove(each)
            print(f"{each.part.name}: {each.record['status']} {reason}", file=sys.stderr, flush=True)
        save([*records.values()])

    try:
        while (waiting or running) and time.time() - began < seconds:
            while waiting and len(running) < at_once:
                part = waiting.pop(0)
                running.append(Running(part, command(part), variables))
                records[part.name] = running[-1].record
            ready = wait([each.connection for each in running], timeout=0.2)
            ended = [each for each in running if each.connection in ready and not each.read()]
            finish(ended, lambda each: "")
            if any(each.record["code"] == NO_GPU for each in ended):
                break
            if ready:
                save([*records.values()])
            over = [each for each in running if each.left <= 0]
            finish(over, lambda each: f"its {each.part.seconds:.0f} s on the device are over")
            _give_turn(running, late=time.time() - began > seconds / 2)
    finally:
        finish([*running], lambda each: f"the time of the run was over while it was {each.state}")
    return [*records.values()]


def record_of(part: Part, status: str) -> dict[str, Any]:
    """The record of a part that has no results yet."""
    return {"name": part.name, "about": part.about, "status": status, "results": []}


def _give_turn(running: Sequence[Running], *, late: bool) -> None:
    """Gives the device, if it is free, to the first part that asks; `late`: quiet parts no longer wait."""
    if any(each.since for each in running):
        return
    compiling = sum(each.compiling for each in running)
    for each in running:  # in order of importance, as they were started
        if each.asks and (late or not compiling or not each.part.quiet):
            each.begin_turn(compiling)
            return


def end(processes: Sequence["subprocess.Popen[bytes]"], patience: float = 2.0) -> None:
    """Ends processes and the processes that they have started, all within `patience` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        until = time.monotonic() + patience
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.01))


def write(folder: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json, the whole file or nothing."""
    beside = folder / ".summary.json"
    beside.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    beside.replace(folder / "summary.json")


def environment(cache: Path, *, rehearse: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """The variables for the parts, and what was installed for them from wheels (see `wheels.install`)."""
    site = ROOT / "build" / "gpu-site"
    try:
        installed = wheels.install(ROOT / "build" / "gpu-wheels", site)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        installed = {"installed": [], "failures": [str(error)[:300]]}
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    # The parts share the memory of the device.
    variables |= {"PIPEJAX_CACHE": str(cache), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if rehearse:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()  # compiles faster
        variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return variables, installed


def main(argv: Sequence[str]) -> int:
    """Runs all parts, and prints the tables."""
    began, names = time.time(), [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="lab/benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default=os.environ.get("OUT") or "runs/gpu", metavar="FOLDER")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--parts", default=",".join(names), metavar="NAME,...", help=f"of {', '.join(names)} (all)")
    parser.add_argument(
        "--seconds", type=int, default=SECONDS, metavar="N", help=f"seconds of the whole run ({SECONDS})"
    )
    flags = parser.parse_args(argv)
    chosen = flags.parts.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"argument --parts: found {unknown[0]!r}; expected some of {', '.join(names)}")
    signal.signal(signal.SIGTERM, interrupted)
    folder = Path(flags.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cache = Path(
        os.environ.get("PIPEJAX_CACHE") or ROOT / "build" / f"{'rehearsal' if flags.rehearse else 'gpu'}-cache"
    )
    summary: dict[str, Any] = {"rehearsal": flags.rehearse, "began": began, "limit": flags.seconds}
    summary |= {"cache_filled": cache.is_dir() and any(cache.iterdir()), "parts": []}
    variables, summary["wheels"] = environment(cache, rehearse=flags.rehearse)
    parts = [part for part in PARTS if part.name in chosen]
    if flags.rehearse:  # interpreted kernels are slow
        parts = [dataclasses.replace(part, seconds=4 * part.seconds) for part in parts]

    def save(records: list[dict[str, Any]]) -> None:
        write(folder, summary | {"parts": records})

    def command(part: Part) -> list[str]:
        return ["-m", "lab.benchmarks.gpu_parts", part.name, *["--rehearse"] * flags.rehearse, "--channel"]

    with contextlib.suppress(KeyboardInterrupt):
        seconds = flags.seconds - ENDING - (time.time() - began)
        at_once = len(os.sched_getaffinity(0))
        summary["parts"] = run(parts, save, command, variables, seconds=seconds, at_once=at_once)
    if not summary["parts"]:
        print("interrupted", file=sys.stderr)
        return 1
    summary["seconds"] = time.time() - began
    write(folder, summary)
    if without := next((x for x in summary["parts"] if x.get("code") == NO_GPU), None):
        print(f"error: {gpu_tables.last_line(without['log'])}", file=sys.stderr)
        return 2
    print("\n".join([*gpu_tables.short(summary), "", *gpu_tables.page(summary), "", f"{folder}/summary.json"]))
    return int(any(record["status"] not in ("done", "skipped") for record in summary["parts"]))


def interrupted(number: int, frame: object) -> NoReturn:
    """Handles a signal: the parts are ended, and their records are written."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
