"""Tests `pipejax probe` on real texts: does it predict which of two Δt is better for training a small T5?

    PIPEJAX_DATA=DIR python -m lab.experiments.real_dependence --init runs/copying/run --json FILE [--set KEY=VALUE ...]

DIR holds kp20k/ and cnn_dailymail/ as JSON lines; --init names a run of `configs/copying.py`. For each data set the
command trains the sequential method, and the pipelined method with each Δt, with equal updates and the same seed. Then
it measures 1,000 unseen documents: `pipejax probe` estimates the cost of each Δt with the sequential model, and the
models of the pipelined method give the likelihoods of tokens under their Δt. Finished parts are not repeated.
"""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from lab.benchmarks.systems import names_of, save
from lab.experiments import real_data
from lab.experiments.probes import DELAYS, write_examples
from lab.experiments.tables.bounds import read
from pipejax import config as config_lib
from pipejax.apps.papers.data_sets import PUBLISHED
from pipejax.apps.probe import measuring, probe_command
from pipejax.apps.probe.likelihoods import WHOLE, Condition, Meter, fit_shapes
from pipejax.apps.probe.summary import is_significant, mean
from pipejax.config import Config
from pipejax.system import cli
from pipejax.system.files import write_text
from pipejax.training.loop import fit

ROOT = Path(__file__).parents[2]
FILES = {
    "kp20k": {"train": "kp20k/train.jsonl.gz", "dev": "kp20k/dev.jsonl.gz"},
    "cnn_dailymail": {"train": "cnn_dailymail/test_994.jsonl.gz", "dev": "cnn_dailymail/validation_1000.jsonl.gz"},
}
TITLES = {"kp20k": "KP20k", "cnn_dailymail": "CNN/DailyMail"}
BATCH = 8
Lines = list[list[float]]  # nats of the tokens of each answer


def main(argv: Sequence[str]) -> int:
    """Trains and measures the models, and prints a table."""
    parser = cli.Parser(prog="python -m lab.experiments.real_dependence", description=__doc__)
    parser.add_argument("--init", required=True, metavar="RUN", help="run of configs/copying.py")
    parser.add_argument(
        "--tasks", default=",".join(FILES), metavar="A,B", help=f"some of {', '.join(FILES)}; default: all"
    )
    parser.add_argument("--workdir", default="runs/real_dependence", metavar="DIR", help="folder of the runs")
    parser.add_argument("--json", metavar="FILE", help="file for all figures")
    updates = probe_command.UPDATES
    parser.add_argument(
        "--updates", type=cli.whole_number(1), default=updates, metavar="N", help=f"updates of the probe ({updates})"
    )
    parser.add_overrides("override a setting of all runs, such as train.steps=400 (repeatable)")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    data, found = real_data.directory(), dict[str, Any]()
    for task in names_of("--tasks", flags.tasks, FILES):
        workdir = Path(flags.workdir) / task
        workdir.mkdir(parents=True, exist_ok=True)
        for split, path in FILES[task].items():
            examples = read(data / path, PUBLISHED[task].placeholders)
            write_examples(workdir / f"{split}.jsonl", (example for example in examples if example.targets))
        base = config_lib.override(
            config_lib.load(str(ROOT / f"configs/{task}_scratch.py")),
            [
                *("data.task=jsonl", f"data.train={workdir / 'train.jsonl'}", f"train.init_from={flags.init}"),
                *flags.overrides,
            ],
        )
        found[task] = {
            "trained_for": base.train.steps,
            "updates": flags.updates,
            **measure(base, workdir, flags.updates),
        }
        print(report(task, found[task]), flush=True)
        if flags.json:
            save(flags.json, {"tasks": found, "command": "python -m lab.experiments.real_dependence " + " ".join(argv)})
    return 0


def measure(base: Config, workdir: Path, updates: int) -> dict[str, Any]:
    """The costs of each Δt by the sequential model, and the likelihoods by the models that were trained with it."""
    run, output = workdir / "sequential", workdir / "sequential-probed"
    train(base, 0, run)
    if not (output / probe_command.PAGE).is_file():
        begun = time.perf_counter()
        given = ["--checkpoint", str(run), "--input", str(workdir / "dev.jsonl"), "--output", str(output)]
        learn = ["--adapt", str(workdir / "train.jsonl"), "--updates", str(updates)]
        probe_command.main([*given, *learn, "--resume"])
        write_text(output / "seconds.json", f"{time.perf_counter() - begun:.0f}\n")
    with (output / probe_command.EXAMPLES).open(encoding="utf-8") as lines:
        answers = [json.loads(line)["nll"] for line in lines]
    asked = {name: [[nats for row in rows[name] for nats in row] for rows in answers] for name in answers[0]}
    own = {delay: likelihoods(base, delay, workdir) for delay in DELAYS}
    costs, trained = dict[str, Any](), dict[str, Any]()
    for less, more in combinations(DELAYS, 2):
        key = f"{less} and {more}"
        costs[key] = gap(asked[f"delay_{less}"], asked[f"delay_{more}"])
        trained[key] = gap(own[less], own[more])
    numbers = json.loads((output / probe_command.NUMBERS).read_text(encoding="utf-8"))
    return {
        "examples": len(asked["whole"]),
        "costs": {str(delay): gap(asked[f"delay_{delay}"], asked["whole"]) for delay in DELAYS},
        "hidden": gap(asked["hidden"], asked["whole"]),
        "says": numbers["says"],
        "nll": {str(delay): sum(map(sum, nll)) / sum(map(len, nll)) for delay, nll in own.items()},
        "probed": costs,
        "trained": trained,
        "right": {key: sign(costs[key]) == sign(trained[key]) for key in costs},
        "seconds": json.loads((output / "seconds.json").read_text(encoding="utf-8")),
    }


def train(base: Config, delay: int, run: Path) -> None:
    """Trains with a Δt, or sequentially if it is 0, unless the run is finished."""
    config = dataclasses.replace(
        base,
        grid=dataclasses.replace(base.grid, delay=max(delay, 1)),
        train=dataclasses.replace(base.train, method="pipelined" if delay else "sequential"),
    )
    if code := fit(config, run):
        raise SystemExit(code)


def likelihoods(base: Config, delay: int, workdir: Path) -> Lines:
    """The nats of the tokens of each answer, by the model that was trained with this Δt."""
    run, kept = workdir / f"delay{delay}", workdir / f"delay{delay}.json"
    if kept.is_file():
        found: Lines = json.loads(kept.read_text(encoding="utf-8"))
        return found
    train(base, delay, run)
    work = measuring.prepare(str(run), str(workdir / "dev.jsonl"), None, best=False, limit=None, most=0, overrides=[])
    shapes = fit_shapes(work.targets, BATCH, group=1)
    assert work.config.model is not None
    # A condition hides further slots in addition to the mask of the training: this sets its Δt.
    meter = Meter(work.config.model.module(), work.params, [Condition(WHOLE)], shapes, BATCH)
    nats = [list[float]()] * len(work.targets)
    for batch in meter.batches(work.targets):
        given = [work.targets[i] for i in batch]
        for i, target, of_target in zip(batch, given, meter.measure(given), strict=True):
            nats[i] = of_target[0][target.encoded.target.weights > 0].astype(float).tolist()
    write_text(kept, json.dumps(nats) + "\n")
    return nats


def gap(dear: Lines, cheap: Lines) -> dict[str, float]:
    """The additional cost of a token in the first, compared with the second, and its standard error over answers."""
    found = mean([(math.fsum(one) - math.fsum(other), len(one)) for one, other in zip(dear, cheap, strict=True)])
    return {"nats": found["cost"], "error": found["error"]}


def sign(found: dict[str, float]) -> int:
    """The sign of a gap: 1 or -1, or 0 if the gap is not significant by `summary.is_significant`."""
    if not is_significant({"cost": abs(found["nats"]), "error": found["error"], "tokens": 0}):
        return 0
    return 1 if found["nats"] > 0 else -1


def report(task: str, found: dict[str, Any]) -> str:
    """A table with the gap between each two Δt by the probe and by training."""
    heads = (f"{TITLES[task]}: Δt", "probed, nats a token", "trained, nats a token", "the same sign")
    lines = [f"| {' | '.join(heads)} |", "|---|--:|--:|---|"]
    for key, right in found["right"].items():
        cells = [f"{part['nats']:+.4f} ± {part['error']:.4f}" for part in (found["probed"][key], found["trained"][key])]
        lines.append(f"| {key} | {' | '.join(cells)} | {'yes' if right else 'no'} |")
    return "\n".join([*lines, "", found["says"]])


if __name__ == "__main__":
    cli.run(main)
