"""Translates all sentences of a document at once: rows start together, and their names are numbers of sentences.

    python -m lab.experiments.translation [--workdir runs/translation] [--set KEY=VALUE ...]

Two made-up languages differ in the order of words: noun, adjectives, adverb, verb, and noun, verb, adverb, adjectives.
The sentences of a document are numbered, and no noun occurs twice. The answer has a row for each sentence, with its
number. A small model is trained with grid.delay=0 and grid.row_names, on documents of 6 sentences and then of 2 to 40.
It decodes unseen documents of 10, 20 and 40 sentences, which name as many rows. The command writes the number of
correct rows, the steps, and the length of the longest sentence to WORKDIR/translation.json. Finished runs are not
trained again.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from lab.experiments import named_rows
from pipejax.apps import demo
from pipejax.config import override
from pipejax.data.examples import Example
from pipejax.inference.answers import texts
from pipejax.inference.loading import load as open_run
from pipejax.system import cli
from pipejax.training.loop import fit

MOST = 40  # most sentences of a document
NAMES = tuple(f"{i}:" for i in range(1, MOST + 1))
ABSENT = "-"  # the row of a number that the document lacks
SYLLABLES = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
NOUNS, ADJECTIVES, ADVERBS, VERBS = ([f"{kind}{s}" for s in SYLLABLES] for kind in ("no", "ad", "av", "ve"))
FIRST = (*NOUNS, *ADJECTIVES[:20], *ADVERBS[:20], *VERBS[:20])
SECOND = {word: f"{word}x" for word in FIRST}
WORDS = (ABSENT, *NAMES, *FIRST, *SECOND.values())
TESTED = 50  # documents that are decoded
CONFIG = override(
    named_rows.CONFIG,
    [
        "name=translation",
        "model.vocab_size=320",
        "grid.delay=0",
        "train.learning_rate=0.001",
        "train.checkpoint_every=250",
    ],
)
SHORT = 6  # sentences of the first documents, on which the model learns the names of rows much faster
# For each training: the sentences of a document, the number of documents, and settings.
TRAININGS = {
    "short": (SHORT, 30_000, ("data.max_source=64", "data.max_target=64", "train.batch_size=32", "train.steps=3000")),
    "long": (MOST, 8_000, ("data.max_source=320", "data.max_target=320", "train.batch_size=8", "train.steps=1000")),
}


def sentence(chance: random.Random, noun: str) -> tuple[str, str]:
    """Draws a sentence of 2 to 5 words, in both languages."""
    verb, adverbs = chance.choice(VERBS[:20]), chance.sample(ADVERBS[:20], chance.randrange(2))
    adjectives = chance.sample(ADJECTIVES[:20], chance.randrange(3))
    first, second = [noun, *adjectives, *adverbs, verb], [noun, verb, *adverbs, *adjectives]
    return " ".join(first), " ".join(SECOND[word] for word in second)


def document(number: int, chance: random.Random, count: int, most: int = MOST, *, sparse: bool = False) -> Example:
    """Draws a document with `count` sentences and a row for each number up to `most`.

    The sentences have the first numbers, or with `sparse` random numbers.
    """
    numbers = sorted(chance.sample(range(most), count)) if sparse else range(count)
    pairs = [sentence(chance, noun) for noun in chance.sample(NOUNS, count)]
    source = " ".join(f"{NAMES[i]} {first}" for i, (first, _) in zip(numbers, pairs, strict=True))
    second = dict(zip(numbers, (text for _, text in pairs), strict=True))
    return Example(str(number), source, tuple(f"{NAMES[i]} {second.get(i, ABSENT)}" for i in range(most)))


def main(argv: Sequence[str]) -> int:
    """Trains and decodes, and prints the results."""
    parser = cli.Parser(prog="python -m lab.experiments.translation", description=__doc__)
    parser.add_argument(
        "--workdir", default="runs/translation", metavar="DIR", help="folder of the run (default: %(default)s)"
    )
    parser.add_overrides("override a setting, such as train.steps=3000 (repeatable)")
    flags = parser.parse_args(argv)
    root, chance = Path(flags.workdir), random.Random("train")
    if not (root / "tokenizer").is_dir():
        demo.build_tokenizer(root / "tokenizer", WORDS)
    before = ""
    for name, (most, documents, settings) in TRAININGS.items():
        rows = f"grid.sub_max={most}", f"grid.row_names={json.dumps(NAMES[:most])}"
        start = f"data.tokenizer={root / 'tokenizer'}", f"train.init_from={before}"
        config = override(CONFIG, [*start, *rows, *settings, *flags.overrides])
        train = [
            document(i, chance, chance.randrange(2, 9), sparse=True)  # teaches each number early
            if name == "long" and i % 2
            else document(i, chance, most if name == "short" else chance.randrange(2, most + 1), most)
            for i in range(documents)
        ]
        cli.note(f"--- {name}: {root / name}")
        if code := fit(config, root / name, given={"train": train, "dev": []}):
            return code
        before = str(root / name)
    generator, found = open_run(root / "long"), dict[int, dict[str, float]]()
    for count in (10, 20, MOST):
        chance = random.Random(count)
        test = [document(i, chance, count) for i in range(TESTED)]
        records = generator.decode([{"source": e.source, "row_prefixes": list(NAMES[:count])} for e in test])
        wanted = [e.targets[:count] for e in test]
        right = [[a == b for a, b in zip(texts(r), rows, strict=True)] for r, rows in zip(records, wanted, strict=True)]
        found[count] = {
            "rows_right": 100 * mean(map(mean, right)),
            "documents_right": 100 * mean(map(all, right)),
            "steps": mean(r["steps"] for r in records),
            "longest_row_and_eos": mean(max(len(row.split()) for row in rows) + 1 for rows in wanted),
            "tokens": mean(sum(len(row.split()) + 1 for row in rows) for rows in wanted),
        }
    for count, values in found.items():
        cli.note(f"{count} sentences: " + ", ".join(f"{key} {value:.2f}" for key, value in values.items()))
    (root / "translation.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    cli.run(main)
