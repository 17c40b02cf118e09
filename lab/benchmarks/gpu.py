"""All that is worth knowing of an NVIDIA GPU, in eight minutes and in order of worth.

    lab/benchmarks/gpu.sh [--rehearse] [--parts NAME,...] [FOLDER]

FOLDER is $OUT, or runs/gpu. Each part is a process that writes FOLDER/PART.json as soon as it knows something, and is
ended when its time is over; what a part does not need the next ones get, and the last ones live of it. After each part
all results so far are in FOLDER/summary.json. Copied to lab/benchmarks/results/gpu.json, that makes the GPU section of
docs/speed.md. --rehearse runs the same on the CPU, with a tiny model, and PyTorch compiles nothing: its figures mean
nothing. --parts gives these the
time of all. Exits with 1 if a part failed or did not end in time.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lab.benchmarks import (  # the standard library is all that they import, too: a part may break alone
    gpu_tables,
    wheels,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "lab" / "benchmarks" / "results" / "gpu.json"
GRACE = 5.0  # seconds between a process being asked to end and being ended
SAID = 3000  # characters of what a part said that are kept
# On standard output in a process of its own, as JAX takes the device until its process ends.
LOOK = """
import importlib.metadata, json, jax
found = {"platform": jax.default_backend(), "kind": jax.devices()[0].device_kind}
found["memory"] = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
found["versions"] = {}
for name in ("jax", "jaxlib", "flax", "numpy", "torch", "triton", "transformers"):
    try:
        found["versions"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """What is run as a process."""

    name: str
    seconds: float  # its share of the time
    about: str
    command: tuple[str, ...]  # arguments of python; "{json}" stands for the file that it writes


def parts(*, rehearse: bool = False, threads: int = 2) -> list[Part]:
    """The parts in order of worth: 480 seconds in all, in a rehearsal twice that, as a CPU compiles more slowly."""

    def decode(*more: str, model: str = "base", patterns: str = "8x14") -> tuple[str, ...]:
        shape = ["--model", model, "--patterns", patterns, "--source", "512", "--threads", str(threads)]
        if rehearse:
            shape = ["--model", "tiny", "--patterns", "3x4", "--source", "32", "--sub-max", "5", "--time-max", "12"]
        return (*shape, "--dtype", "bfloat16", *more)

    def module(name: str, *arguments: str) -> tuple[str, ...]:
        return ("-m", f"lab.benchmarks.{name}", *arguments)

    def steps(name: str, *more: str, models: str = "base", count: str = "4") -> tuple[str, ...]:
        setting = ["--config", "configs/jsonl.py", "--models", models, "--steps", count]
        if rehearse:  # the last of a flag counts
            settings = ("train.batch_size=4", "train.accumulate=2", "data.max_source=32", "data.max_target=16")
            setting = ["--config", "configs/jsonl.py", *(x for each in settings for x in ("--set", each))]
            more = (*more, "--models", "tiny", "--steps", "2", *(("--sources", "16,64") if "--sources" in more else ()))
        return module(name, *setting, *more, *out)

    out, rounds = ("--json", "{json}"), "1" if rehearse else "2"
    shape = ("--model", "tiny", "--layers", "1", "--source", "32", "--batch", "2", "--rows", "3", "--times", "8")
    small = (*shape, "--dtype", "bfloat16")
    every, batches = "8x14,7x40,5x4", "1,2" if rehearse else "1,8"
    both = ("--batch", batches, "--kernels", "own,xla", "--peers", "hf", "--rounds", rounds)
    tiny = ("--models", "tiny", "--source", "32", "--queries", "1,3", "--steps", "4") if rehearse else ()
    answer = ("--pattern", "3x4", "--source", "32") if rehearse else ()
    peers, one = "peers.training", ("--ways", "checkpointing")
    lengths = ("--sources", "512,1024,4096,8192,16384")
    found = [
        Part(
            "train", 55, "a training step, its compilation from nothing and from the cache", steps("steps", "--again")
        ),
        Part("train-peers", 45, "transformers' training step", steps(peers)),
        Part("decode", 80, "T5-Base", module("decode", *decode(*both, patterns=every), *out)),
        Part("profile", 30, "kernels and waiting", steps("profile", *answer)),
        Part("graph", 20, "a step by hand in PyTorch, in a CUDA graph", module("graph", *tiny, *out)),
        Part("kernels", 30, "own kernels beside XLA", module("agreement", *(small if rehearse else ()), *out)),
        Part("auto", 25, "a training step, `remat` chosen", steps("steps", "--set", "train.remat=auto")),
        Part("lengths", 50, "training steps by length", steps("steps", *lengths, count="3")),
        Part("lengths-peers", 25, "transformers by length", steps(peers, *lengths, *one, count="3")),
        Part("models", 40, "training steps by size", steps("steps", models="small,large")),
        Part("models-peers", 20, "transformers by size", steps(peers, *one, models="small,large")),
        Part(
            "compiled",
            25,
            "T5-Base beside transformers, compiled, with a static cache",
            module("decode", *decode("--peers", "hf-compiled", "--rounds", rounds, patterns="8x14"), *out),
        ),
        Part("buffers", 15, "other ways to decode", module("buffers", *out, "--", *decode("--rounds", rounds))),
        Part(
            "large", 10, "T5-Large", module("decode", *decode("--peers", "hf", "--rounds", rounds, model="large"), *out)
        ),
        Part(
            "tests",
            10,
            "tests of the suite",
            module("suite", *out, *(("--", "-m", "not slow and not long", "tests/test_gpu.py") if rehearse else ())),
        ),
    ]
    return [dataclasses.replace(part, seconds=(1 + rehearse) * part.seconds) for part in found]


def only(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """The parts of these names, which share the time of all.

    Raises:
      ValueError: there is no part of such a name.
    """
    if missing := [name for name in names if name not in {part.name for part in parts}]:
        raise ValueError(f"found {missing[0]!r}; expected some of {', '.join(part.name for part in parts)}")
    chosen = [part for part in parts if part.name in names]
    more = sum(part.seconds for part in parts) / sum(part.seconds for part in chosen)
    return [dataclasses.replace(part, seconds=more * part.seconds) for part in chosen]


def run(parts: Sequence[Part], folder: Path, summary: dict[str, Any], variables: dict[str, str]) -> bool:
    """Runs the parts one after the other; whether all ended well and in time.

    A part is ended when its own seconds and those of the parts before it are over, counted from `summary["began"]`.

    Args:
      parts: what to run.
      folder: of their files and of summary.json, which is written after each.
      summary: what is known before; "parts" is added.
      variables: the environment of the processes.
    """
    summary["parts"], deadline = [], summary["began"]
    for part in parts:
        deadline += part.seconds
        record: dict[str, Any] = {"name": part.name, "about": part.about, "status": "cut off"}
        summary["parts"].append(record)
        write(folder, summary)
        print(
            f"{part.name} ({part.about}), at most {max(deadline - time.time(), 0):.0f} s", file=sys.stderr, flush=True
        )
        record |= run_part(part, folder, deadline - time.time(), variables)
        if record["status"] != "done":
            print(f"{part.name}: {record['status']}\n{record['said']}", file=sys.stderr, flush=True)
    summary["seconds"] = time.time() - summary["began"]
    write(folder, summary)
    return all(record["status"] == "done" for record in summary["parts"])


def run_part(part: Part, folder: Path, seconds: float, variables: dict[str, str]) -> dict[str, Any]:
    """Runs a part for at most so many seconds; its status ("done", "failed", "timed out"), last words and results."""
    output = folder / f"{part.name}.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, *(x.replace("{json}", str(output)) for x in part.command)]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as log:
        # A group of its own, so that whatever it started ends with it.
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log, process_group=0)
        try:
            code = process.wait(max(seconds, 0))
            status = "done" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            code, status = None, "timed out"
        finally:
            end(process)
        log.seek(max(log.seek(0, os.SEEK_END) - SAID, 0))
        said = log.read().decode(errors="replace")
    results = None
    with contextlib.suppress(OSError, ValueError):  # it wrote none, or was ended before it could
        results = json.loads(output.read_text(encoding="utf-8"))
    return {
        "status": status,
        "code": code,
        "seconds": time.monotonic() - begun,
        "limit": seconds,
        "said": said,
        "results": results,
    }


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def write(folder: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json, the whole file or nothing."""
    beside = folder / ".summary.json"
    beside.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    beside.replace(folder / "summary.json")


def look(variables: dict[str, str]) -> dict[str, Any]:
    """The device that JAX finds here and the versions of libraries; of a failure the "error"."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOOK], env=variables, capture_output=True, text=True, check=True, timeout=60
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return {"platform": None, "error": said[-1][:300] if said else type(error).__name__}
    return found


def environment(site: Path, *, rehearse: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """The variables for the parts, and what was installed for them from wheels (see `wheels.install`)."""
    directory, python = ROOT / "build" / "gpu-wheels", "{}.{}".format(*sys.version_info)
    installed: dict[str, Any] = {"installed": [], "failures": []}
    try:
        if rehearse:  # of this Python, whatever that of the GPU's machine is
            directory = ROOT / "build" / f"rehearsal-wheels-{python}"
            wheels.collect(directory, python)
        installed = wheels.install(directory, site, anyway=rehearse)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        installed["failures"].append(str(error)[:300])
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    if rehearse:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()  # compiles faster
        # PyTorch's compiler writes C++ here and not what it writes for a GPU, and takes minutes.
        variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TORCH_COMPILE_DISABLE": "1"}
    return variables, installed


def main(argv: Sequence[str]) -> int:
    """Runs all, prints the summary."""
    parser = argparse.ArgumentParser(
        prog="lab/benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default=os.environ.get("OUT") or "runs/gpu", metavar="FOLDER")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model")
    parser.add_argument("--parts", metavar="NAME,...", help=f"of {', '.join(part.name for part in parts())} (all)")
    flags = parser.parse_args(argv)
    chosen = parts(rehearse=flags.rehearse, threads=len(os.sched_getaffinity(0)))
    if flags.parts is not None:
        try:
            chosen = only(chosen, flags.parts.split(","))
        except ValueError as error:
            parser.error(f"argument --parts: {error}")
    signal.signal(signal.SIGTERM, interrupted)
    folder, began = Path(flags.folder).resolve(), time.time()
    folder.mkdir(parents=True, exist_ok=True)
    variables, installed = environment(ROOT / "build" / "gpu-site", rehearse=flags.rehearse)
    device = look(variables)
    if not flags.rehearse and device["platform"] != "gpu":
        found = device.get("error") or f"JAX on {device['platform']}"
        print(f"error: {sys.executable}: found no GPU ({found}); expected one, or --rehearse", file=sys.stderr)
        return 2
    summary = {"rehearsal": flags.rehearse, "began": began, "device": device, "wheels": installed}
    try:
        well = run(chosen, folder, summary, variables)
    except KeyboardInterrupt:
        write(folder, summary)
        print("interrupted", file=sys.stderr)
        well = False
    print("\n".join([*gpu_tables.short(summary), "", *gpu_tables.page(summary)[1:], "", f"{folder}/summary.json"]))
    return int(not well)


def interrupted(number: int, frame: object) -> NoReturn:
    """A handler of signals: what runs is ended, and what is known is written."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
