"""What fits on a card, by `pipejax plan --target`: the compiler's plan of training steps, without the card.

    make venv-programs
    python -m lab.benchmarks.fits --json lab/benchmarks/results/fits.json

Each line is a process that compiles for minutes; results are written after each. A setting that the compiler has no
room for counts as one that does not fit.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.systems import save
from pipejax.system import cli
from pipejax.system.targets import TARGETS, Gpu

ROOT = Path(__file__).resolve().parents[2]
BATCHES = {
    "24 examples in four parts": (),
    "one example": ("train.batch_size=1", "train.accumulate=1"),
    "24 examples in four parts, adafactor": ("train.optimizer=adafactor",),
}
CASES = (  # in order of worth: card, model, tokens of a source, batch
    ("rtx4090", "base", 2048, "24 examples in four parts"),
    ("rtx4090", "base", 16384, "one example"),
    ("h100", "large", 4096, "24 examples in four parts"),
    ("h100", "base", 2048, "24 examples in four parts"),
    ("rtx4090", "large", 2048, "24 examples in four parts, adafactor"),
    ("h100", "base", 16384, "24 examples in four parts"),
    ("h100", "large", 16384, "one example"),
)


def main(argv: Sequence[str]) -> int:
    """Plans, prints a line for each case, writes JSON after each."""
    parser = cli.Parser(prog="python -m lab.benchmarks.fits", description=__doc__)
    parser.add_argument("--cases", type=cli.whole(1), default=len(CASES), metavar="N", help="the first so many (all)")
    parser.add_argument("--json", required=True, metavar="OUT", help="write the results there")
    flags = parser.parse_args(argv)
    cli.check_output("--json", flags.json)
    found: dict[str, Any] = {"results": [], "command": "python -m lab.benchmarks.fits " + " ".join(argv)}
    for case in CASES[: flags.cases]:
        found["results"].append(planned(*case))
        print(found["results"][-1], flush=True)
        save(flags.json, found)
    return 0


def planned(card: str, model: str, source: int, batch: str) -> dict[str, Any]:
    """The bytes that `pipejax plan` finds, and whether they fit into the card."""
    kind = TARGETS[card]
    assert isinstance(kind, Gpu)
    settings = (f"data.max_source={source}", *BATCHES[batch])
    command = [sys.executable, "-m", "pipejax", "plan", "--config", "configs/jsonl.py", "--json", "--model", model]
    command += ["--target", card, *(f"--set={each}" for each in settings)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"card": card, "model": model, "source": source, "batch": batch, "settings": [*settings]}
    if done.returncode:
        return result | {"card_bytes": kind.device_memory_size, "error": done.stderr.strip().splitlines()[-1][:300]}
    plan = json.loads(done.stdout)
    sizes = {"compiled": plan["compiled_total_bytes"], "estimate": plan["estimate_total_bytes"]}
    return result | {"remat": plan["remat"], "card_bytes": kind.device_memory_size, **sizes}


if __name__ == "__main__":
    cli.run(main)
