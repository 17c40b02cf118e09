"""Flips single bits in a run's tokenizer: decoding and training must refuse it, or no id of any text may change."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from lab.faults import runs
from lab.faults.runs import Commands
from pipejax import config as config_lib
from pipejax.apps import demo
from pipejax.checkpoint import Store
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference.loading import load
from pipejax.system.errors import UserError
from pipejax.training import start
from pipejax.training.run_directory import RunDirectory

SETTINGS = ("train.steps=4", "data.dev=")

Ids = list[list[int]]


def many(commands: Commands, scratch: Path, *, trials: int) -> dict[str, Any]:
    """Flips one bit of one file in each trial, and opens the run as decoding and as training open it."""
    path = runs.prepare(scratch / "tiny")
    assert commands.train(path, scratch / "run", *SETTINGS).end() == 0
    parts = commands.share("lab.faults.bits", scratch, trials)
    counts = sum((Counter(part["counts"]) for part in parts), Counter[str]())
    failures = [failure for part in parts for failure in part["failures"]]
    return {
        "bits": trials,
        "openings": counts.total(),
        "refused_in_one_line": counts["refused"],
        "same_ids": counts["the same ids"],
        "silently_other_ids": counts["OTHER IDS"],
        "ok": not failures and counts.total() == 2 * trials,
        "failures": failures[:10],
    }


def main(argv: Sequence[str]) -> int:
    """Makes the trials from one number to another."""
    scratch, first, last, out = Path(argv[0]), int(argv[1]), int(argv[2]), Path(argv[3])
    config = config_lib.load(scratch / "tiny/config.py", SETTINGS)
    original, copy = scratch / "run/tokenizer", scratch / f"copy-{first}"
    files = sorted(file for file in original.iterdir() if file.is_file() and file.stat().st_size)
    ways: dict[str, Callable[[Path], Tokenizer | None]] = {
        "decoding": lambda run: load(run).tokenizer,
        "training": lambda run: _resume(run, config),
    }
    texts = _texts()
    expected = {name: _ids(way(scratch / "run"), texts) for name, way in ways.items()}
    counts, failures = Counter[str](), []
    runs.copy(scratch / "run", copy)
    for number in range(first, last):
        chance = random.Random(number)
        runs.copy(original, copy / "tokenizer")
        file = copy / "tokenizer" / chance.choice(files).name
        content = bytearray(file.read_bytes())
        place, bit = chance.randrange(len(content)), chance.randrange(8)
        content[place] ^= 1 << bit
        file.write_bytes(content)
        for name, way in ways.items():
            try:
                result = "the same ids" if _ids(way(copy), texts) == expected[name] else "OTHER IDS"
            except UserError as error:
                result = "refused" if "\n" not in str(error) else "SEVERAL LINES"
            except Exception as error:
                result = f"TRACEBACK {type(error).__name__}"
            counts[result] += 1
            if result not in ("the same ids", "refused"):
                failures.append(f"{name}: {file.name}, byte {place}, bit {bit}: {result}")
    out.write_text(json.dumps({"counts": counts, "failures": failures}))
    return 0


def _resume(run: Path, config: config_lib.Config) -> Tokenizer:
    """The tokenizer with which training would continue."""
    store = Store(run / "checkpoints")
    data = cast(dict[str, str], store.describe(store.steps()[0]).metadata)
    return start.start_run(config, RunDirectory(run), store, data).tokenizer


def _ids(tokenizer: Tokenizer | None, texts: list[str]) -> tuple[Ids, list[str]]:
    """The ids of texts by a tokenizer, and the text of every id."""
    assert tokenizer is not None
    return [tokenizer.encode(text) for text in texts], [tokenizer.decode([i]) for i in range(tokenizer.size)]


def _texts() -> list[str]:
    """Texts with every word of the vocabulary, and texts with other words."""
    words = [*demo.NOUNS, "unknown", "Honey", "maps.", "1234", "\u00e9t\u00e9", "a b", ""]
    return [*words, " ".join(words), "  honey   maps ", "honey\tmaps\nhoney", "</s> honey <pad>"]
