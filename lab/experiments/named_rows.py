"""Extracts ten fields of a document in one decode, with named rows that start together and with other decoders.

    python -m lab.experiments.named_rows [--workdir runs/named_rows] [--set KEY=VALUE ...]

A generated letter has one sentence for each of ten fields, in random order; about one sentence in seven is left out.
The answer has a row for each field, in a given order: "sender: anna berg", or "gift: none". The same small model is
trained for the same number of steps to write these rows one after the other, one step apart (grid.delay=1), and all at
once (grid.delay=0 with grid.row_names). The command prints a table and writes all figures to WORKDIR/named_rows.json.
Finished runs are not trained again.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from lab.demo import compare
from pipejax import config as config_lib
from pipejax import grid
from pipejax.apps import demo
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, T5Config, TrainConfig
from pipejax.data.examples import Example
from pipejax.inference.answers import Record, texts
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load as open_run
from pipejax.system import cli
from pipejax.training.loop import fit

# The values of each field: one word is drawn from each list. No word is in two fields, so that a small model learns to
# find these words and to copy them within minutes.
FIELDS = {
    "sender": ("anna bela carl dora emil frida gustav hanna", "berg holm lund strand dahl falk vik nord"),
    "receiver": ("north south west east royal free", "bank mill school library theatre museum"),
    "sent": ("first second third fourth fifth sixth seventh eighth", "march april june july august october"),
    "due": ("monday tuesday wednesday thursday friday saturday", "morning noon evening night"),
    "origin": ("oslo bergen malmo turku aarhus odense visby kiruna tampere",),
    "goal": ("spain france italy greece poland austria ireland latvia",),
    "goods": ("small large heavy tiny", "red green blue white black", "lamps boxes books ropes tiles bells coats maps"),
    "gift": ("sweet sour salted fresh", "apple cherry lemon plum pear", "jam cake juice tea pie bread"),
    "price": ("2 3 4 5 6 7 8 9 10 11 12", "crowns marks francs pounds"),
    "fee": ("half double full reduced", "rate"),
}
NAMES = tuple(f"{field}:" for field in FIELDS)
NONE, ABSENT = "none", 1 / 7  # the value of a missing field, and the share of missing fields
WORDS = (
    ".",
    "the",
    "is",
    NONE,
    *FIELDS,
    *NAMES,
    *(w for lists in FIELDS.values() for words in lists for w in words.split()),
)
EXAMPLES = {"train": 20_000, "test": 1_000}
CONFIG = Config(
    name="named_rows",
    model=T5Config(vocab_size=256, d_model=128, d_kv=32, d_ff=256, num_heads=4, num_layers=2, num_decoder_layers=2),
    grid=GridConfig(time_max=32, sub_max=12),
    data=DataConfig(task="jsonl", max_source=96, max_target=96, separator=f" {demo.SEPARATOR} "),
    train=TrainConfig(
        steps=500,
        batch_size=16,
        shapes=2,
        learning_rate=2e-3,
        schedule="linear",
        warmup_steps=100,
        beta2=0.98,
        dropout=0.0,
        log_every=100,
        checkpoint_every=500,
        keep_checkpoints=1,
    ),
    decode=DecodeConfig(max_length=96, batch_size=50),
)
TOGETHER = ("grid.delay=0", f"grid.sub_max={len(NAMES)}", f"grid.row_names={json.dumps(NAMES)}")
RUNS: dict[str, tuple[str, ...]] = {
    "sequential": ("train.method=sequential",),
    "delay 1": ("grid.delay=1",),
    "delay 0, named": TOGETHER,
}


def examples(split: str) -> list[Example]:
    """The examples of the split "train" or "test"."""
    chance, found = random.Random(split), list[Example]()
    for number in range(EXAMPLES[split]):
        values = {
            field: "" if chance.random() < ABSENT else " ".join(chance.choice(words.split()) for words in lists)
            for field, lists in FIELDS.items()
        }
        sentences = [f"the {field} is {value} ." for field, value in values.items() if value]
        chance.shuffle(sentences)
        rows = tuple(f"{field}: {value or NONE}" for field, value in values.items())
        found.append(Example(f"{split}-{number}", " ".join(sentences), rows))
    return found


def well_formed(record: Record) -> bool:
    """Whether the rows begin with the names in order, and no row was truncated."""
    rows = texts(record)
    named = len(rows) == len(NAMES) and all(row.startswith(f"{name} ") for row, name in zip(rows, NAMES, strict=True))
    return named and record["truncated"] is None


def main(argv: Sequence[str]) -> int:
    """Trains and decodes, and prints the table."""
    parser = cli.Parser(prog="python -m lab.experiments.named_rows", description=__doc__)
    parser.add_argument(
        "--workdir", default="runs/named_rows", metavar="DIR", help="folder of the runs (default: %(default)s)"
    )
    parser.add_overrides("override a setting of all runs, such as train.steps=3000 (repeatable)")
    flags = parser.parse_args(argv)
    root = Path(flags.workdir)
    tokenizer = root / "tokenizer"
    if not tokenizer.is_dir():
        demo.build_tokenizer(tokenizer, WORDS)
    train, test = examples("train"), examples("test")
    generators: dict[str, Generator] = {}
    for name, settings in RUNS.items():
        config = config_lib.override(CONFIG, [f"data.tokenizer={tokenizer}", *settings, *flags.overrides])
        directory = root / name.replace(",", "").replace(" ", "-")
        cli.note(f"--- {name}: {directory}")
        if code := fit(config, directory, given={"train": train, "dev": []}):
            return code
        generators[name] = open_run(directory)
        if name == "delay 1":  # the same weights, with the names of rows given
            generators["delay 1, named"] = open_run(directory, overrides=[f"grid.row_names={json.dumps(NAMES)}"])
    results, records = compare(generators, test)
    for name, result in results.items():
        right = [texts(r) == list(e.targets) for e, r in zip(test, records[name], strict=True)]
        result |= {"documents": 100 * mean(right), "well_formed": sum(map(well_formed, records[name]))}
    steps = simulated(test)
    print(table(results) + "\n\n" + steps_table(steps))
    found = {"results": results, "steps_of_the_targets": steps}
    (root / "named_rows.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def table(results: dict[str, dict[str, Any]]) -> str:
    """A Markdown table with a line for each decoder."""
    lines = [
        "| decoder | rows right, F1 | whole documents right, % | well-formed | steps | ms a document | speed-up |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        lines.append(
            f"| {name} | {r['em_f1']:.2f} | {r['documents']:.1f} | {r['well_formed']} of {r['examples']} | "
            f"{r['steps']:.2f} | {r['milliseconds']:.2f} | {r['speed_up']:.2f} |"
        )
    return "\n".join(lines)


def simulated(test: Sequence[Example]) -> dict[str, float]:
    """The mean steps of a perfect model for the targets, if rows start by other rules.

    By an adaptive rule, a row starts as soon as the row above has written its name, its first word after the name, or
    all of its tokens.
    """
    rows = [[len(row.split()) for row in example.targets] for example in test]
    bounds = {"sub_max": len(NAMES), "time_max": 10**6}
    found = {f"delay {d}": mean(grid.pipelined_steps(r, delay=d, **bounds) for r in rows) for d in (0, 1, 2, 4)}
    for rule, waits in (
        ("after the name above", lambda length: 1),
        ("after the first word above", lambda length: 2),
        ("after the row above", lambda length: length),
    ):
        found[rule] = mean(_adaptive(r, waits) for r in rows)
    return found | {"sequential": mean(map(grid.sequential_steps, rows))}


def _adaptive(lengths: Sequence[int], waits: Callable[[int], int]) -> int:
    """The steps for rows of these lengths, if a row starts after `waits(length)` tokens of the row above."""
    starts = [sum(map(waits, lengths[:i])) for i in range(len(lengths))]
    return max(begun + length + 1 for begun, length in zip(starts, lengths, strict=True))


def steps_table(found: dict[str, float]) -> str:
    """A Markdown table of the steps, with a line for each rule."""
    return "\n".join(["| a row starts | steps |", "|---|---|", *(f"| {k} | {v:.2f} |" for k, v in found.items())])


if __name__ == "__main__":
    cli.run(main)
