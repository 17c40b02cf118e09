"""Tests paths without permissions to read, enter or write, and names that are too long, in each argument of a path."""

from pathlib import Path
from typing import Any

from lab.faults import refusals
from lab.faults.refusals import DECODE, FROM_HF, RESUME, TRAIN, Kind
from lab.faults.runs import Commands

DENIED = "denied"  # a directory of each trial with the files of the good run
CONVERT, VERIFY = "pipejax.convert.__main__", "pipejax.apps.verify.checkpoint_command"
METRICS, PICTURE = "pipejax.apps.scoring.metrics_command", "pipejax.apps.picture.picture_command"
DATA = "pipejax.apps.statistics.data_command"
PLACES: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # {place}: the path that cannot be reached
    ("train.py --config", "train", ("--config={place}", "--workdir={{here}}/new")),
    ("train.py --workdir", "train", ("--config={{here}}/config.py", "--workdir={place}")),
    ("data.train", "train", (*TRAIN, "--set=data.train={place}")),
    ("data.dev", "train", (*TRAIN, "--set=data.dev={place}")),
    ("data.tokenizer", "train", (*TRAIN, "--set=data.tokenizer={place}")),
    ("train.init_from", "train", (*TRAIN, "--set=train.init_from={place}", "--set=data.tokenizer=")),
    ("decode.py --checkpoint", "decode", ("--checkpoint={place}", *DECODE[1:])),
    ("decode.py --input", "decode", (DECODE[0], "--input={place}", DECODE[2])),
    ("decode.py --output", "decode", (*DECODE[:2], "--output={place}")),
    ("evaluate --checkpoint", "pipejax.offline.evaluation", ("--checkpoint={place}",)),
    ("evaluate --json", "pipejax.offline.evaluation", ("--checkpoint={{here}}/run", "--json={place}")),
    ("evaluate --predictions", "pipejax.offline.evaluation", ("--checkpoint={{here}}/run", "--predictions={place}")),
    ("from-hf SRC", CONVERT, ("from-hf", "{place}", "{{here}}/converted")),
    ("from-hf OUT", CONVERT, ("from-hf", "{{here}}/hf", "{place}")),
    ("to-hf CHECKPOINT", CONVERT, ("to-hf", "{place}", "{{here}}/converted")),
    ("to-hf OUT", CONVERT, ("to-hf", "{{here}}/run", "{place}")),
    ("verify DIR", VERIFY, ("verify", "{place}")),
    ("plan --config", "pipejax.apps.plan.plan_command", ("--config={place}",)),
    ("metrics FILE", METRICS, ("spans", "{place}")),
    ("picture RECORDS", PICTURE, ("{place}", "--output={{here}}/x.svg")),
    ("prepare --manual-dir", DATA, ("prepare", "msqa", "--manual-dir={place}", "--data-dir={{here}}/data")),
    ("prepare --data-dir", DATA, ("prepare", "msqa", "--manual-dir={{here}}/hf", "--data-dir={place}")),
    ("stats --data-dir", DATA, ("stats", "msqa", "--data-dir={place}")),
    ("stats --tokenizer", DATA, ("stats", "demo", "--tokenizer={place}")),
)
PARTS = (  # files of a run, a Hugging Face directory and data that cannot be read, in directories that can be
    ("a config file", "train", TRAIN, "config.py"),
    ("training data", "train", TRAIN, "train.jsonl"),
    ("a tokenizer", "train", TRAIN, "tokenizer"),
    ("a file of the tokenizer", "train", TRAIN, "tokenizer/tokenizer.json"),
    ("a run to resume", "train", RESUME, "run"),
    ("its checkpoints", "train", RESUME, "run/checkpoints"),
    ("its lock", "train", RESUME, "run/.lock"),
    ("the step to resume from", "train", RESUME, "run/checkpoints/4"),
    ("its manifest", "train", RESUME, "run/checkpoints/4/manifest"),
    ("its tokenizer", "train", RESUME, "run/tokenizer"),
    ("checkpoints to decode", "decode", DECODE, "run/checkpoints"),
    ("the step to decode", "decode", DECODE, "run/checkpoints/4"),
    ("parameters to decode", "decode", DECODE, "run/checkpoints/4/params"),
    ("the tokenizer to decode with", "decode", DECODE, "run/tokenizer"),
    ("a file of that tokenizer", "decode", DECODE, "run/tokenizer/tokenizer.json"),
    ("an input", "decode", DECODE, "in.jsonl"),
    ("an output that exists", "decode", DECODE, "out.jsonl"),
    ("a Hugging Face directory", CONVERT, FROM_HF, "hf"),
    ("its config.json", CONVERT, FROM_HF, "hf/config.json"),
    ("its weights", CONVERT, FROM_HF, "hf/model.safetensors"),
    ("its tokenizer.json", CONVERT, FROM_HF, "hf/tokenizer.json"),
    ("checkpoints to verify", VERIFY, ("verify", "{here}/run"), "run/checkpoints"),
)


def _place(name: str, command: str, arguments: tuple[str, ...], place: str, words: str, deny: str = "") -> Kind:
    filled = tuple(argument.format(place=place) if "{place}" in argument else argument for argument in arguments)
    filled = tuple(argument.replace("{{here}}", "{here}") for argument in filled)
    return Kind(name, (words,), command, filled, lambda here: (here / DENIED / "inner").mkdir(parents=True), deny=deny)


KINDS = (
    *(_place(f"denied: {n}", c, a, f"{{here}}/{DENIED}/inner", "ermission denied", DENIED) for n, c, a in PLACES),
    *(_place(f"300 letters: {n}", c, a, "{here}/" + "x" * 300, "too long") for n, c, a in PLACES),
    *(_place(f"6,000 letters: {n}", c, a, "{here}" + "/xxxxx" * 1000, "too long") for n, c, a in PLACES),
    *(Kind(f"denied: {n}", ("ermission denied",), c, a, deny=deny) for n, c, a, deny in PARTS),
)


def many(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Tries all cases."""
    return refusals.summary(refusals.many(commands, scratch, KINDS))
