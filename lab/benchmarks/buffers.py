"""Decoding with the loop inside CUDA's command buffers, and without them: XLA is told by a flag when a process starts.

    python -m lab.benchmarks.buffers --json OUT [ARGUMENTS of lab.benchmarks.decode]

XLA puts kernels into command buffers by itself, but not the `while` around them. How the flag is written has changed
between versions, so each setting has several ways to write it: the first that this XLA takes is measured. Words of a
way that are no flags of XLA, NAME=VALUE, are variables of the process: other ways to decode have their lines in
`SETTINGS`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.systems import save
from pipejax.system import cli

FLAG = "--xla_gpu_enable_command_buffer="
KERNELS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN"
SETTINGS: dict[str, tuple[str, ...]] = {
    "loop": (f"{FLAG}+WHILE,+CONDITIONAL", f"{FLAG}{KERNELS},WHILE,CONDITIONAL", f"{FLAG}{KERNELS},WHILE"),
    "kernels": ("",),  # as XLA does by itself
    "none": (FLAG,),
}


def main(argv: Sequence[str]) -> int:
    """Measures each setting in a process of its own, writes JSON after each."""
    parser = cli.Parser(prog="python -m lab.benchmarks.buffers", description=__doc__)
    parser.add_argument("--json", required=True, metavar="OUT", help="write the results there")
    parser.add_argument("arguments", nargs="*", help="of lab.benchmarks.decode, after --")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    found: dict[str, Any] = {"results": [], "tried": []}
    found["command"] = "python -m lab.benchmarks.buffers " + " ".join(argv)
    for setting, ways in SETTINGS.items():
        for way in ways:
            said, results = measured(way, flags.arguments)
            found["tried"].append({"setting": setting, "flags": way, "taken": bool(results)})
            if not results:
                found["tried"][-1]["error"] = said
            found["results"] += [{"setting": setting, "flags": way, **result} for result in results]
            print(f"{setting}: {way or 'no flag'}: " + (f"{len(results)} results" if results else said), flush=True)
            save(flags.json, found)
            if results:
                break
    measured_settings = {result["setting"] for result in found["results"]}
    return int(measured_settings != {*SETTINGS})


def measured(flags: str, arguments: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """What lab.benchmarks.decode said last under these flags of XLA and variables, and its results."""
    words = flags.split()
    of_xla = " ".join([os.environ.get("XLA_FLAGS", ""), *(word for word in words if word.startswith("--"))])
    own = dict(word.split("=", 1) for word in words if not word.startswith("--"))
    variables = os.environ | {"XLA_FLAGS": of_xla.strip()} | own
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "out.json"
        command = [sys.executable, "-m", "lab.benchmarks.decode", *arguments, "--json", str(output)]
        done = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True, check=False)
        results = json.loads(output.read_text())["results"] if output.is_file() else []
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return (lines or [f"exit code {done.returncode}"])[-1][:500], results


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
