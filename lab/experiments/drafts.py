"""Counts the decoder calls that drafts save on real answers with a perfect model: by a simulation, and by pipejax.

    PIPEJAX_DATA=DIR python -m lab.experiments.drafts [--examples N] [--draft source] [--json FILE]

DIR holds the data sets below as JSON lines with "source" and "targets", and T5's tokenizer in t5_tokenizer/. The model
always writes the gold rows. The simulation uses plain lists and the simplest drafter: it searches the source for the
last three, two or one tokens of a row, and proposes the eight tokens after the first place found. The calls of pipejax
are counted in its decoding loop (`tests/support/scripted.py`).
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.experiments import real_data
from pipejax import grid
from pipejax.config import DRAFTS
from pipejax.data.formats import read_records
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Drafts, Pipelined, Sequential, drafters, with_drafts
from pipejax.system import cli
from support import scripted

BOS, EOS, MAX_SOURCE, TOKENS = 0, 1, 2048, 8
Row = list[int]
Guess = Callable[[Sequence[int]], Sequence[int]]  # maps the tokens of a row to proposed next tokens


@dataclasses.dataclass(frozen=True)
class DataSet:
    """Real answers."""

    name: str
    path: str
    examples: int
    separator: str  # between the rows of a sequential answer


SETS = (
    DataSet("MSQA test", "multispanqa/test.jsonl", 653, " # "),
    DataSet("KP20k test", "kp20k/test.jsonl.gz", 500, ";"),
    DataSet("CNN/DM validation", "cnn_dailymail/validation_1000.jsonl.gz", 300, " "),
    DataSet("SumPubMed test", "sumpubmed/test.jsonl.gz", 100, " "),
)


@dataclasses.dataclass(frozen=True)
class Example:
    """Token ids."""

    source: Row
    rows: list[Row]
    sequential: Row


def lookup(source: Sequence[int]) -> Guess:
    """The simplest drafter: it copies the tokens after the first match in the source."""
    first: dict[tuple[int, ...], int] = {}
    for size in (1, 2, 3):
        for i in range(len(source) - size):
            first.setdefault(tuple(source[i : i + size]), i + size)

    def drafts(row: Sequence[int]) -> Sequence[int]:
        for size in (3, 2, 1):
            place = first.get(tuple(row[-size:])) if len(row) >= size else None
            if place is not None:
                return source[place : place + TOKENS]
        return []

    return drafts


def simulated(rows: Sequence[Sequence[int]], drafts: Guess, *, delay: int = 1) -> int:
    """The number of decoder calls for `rows`, which end in eos and include the empty row.

    A token at time t is accepted if the drafts of its row and of all open rows above it are correct up to t. A row
    starts in the call in which all rows above it are written up to its start.
    """
    length: list[int] = []
    calls = 0
    while len(length) < len(rows) or any(n < len(row) for n, row in zip(length, rows, strict=True)):
        ends = [n == len(row) for n, row in zip(length, rows, strict=False)]
        begins = grid.start(len(length), delay)
        if len(length) < len(rows) and all(
            over or grid.start(i, delay) + length[i] >= begins for i, over in enumerate(ends)
        ):
            length.append(0)
            ends.append(False)
        limit = float("inf")
        for i, over in enumerate(ends):
            if over:
                continue
            rest, newest = rows[i][length[i] :], grid.start(i, delay) + length[i]
            run = 0
            for token, wanted in zip(drafts(rows[i][: length[i]]), rest, strict=False):
                if token != wanted:
                    break
                run += 1
            length[i] += min(len(rest), int(min(run, limit - newest)) + 1)
            limit = min(limit, newest + run) if run < len(rest) else limit
        calls += 1
    return calls


def product(strategy: Pipelined | Sequential, draft: str, examples: Sequence[tuple[Row, list[Row]]]) -> float:
    """The mean number of decoder calls in pipejax's decoding loop."""
    drafted = with_drafts(strategy, Drafts(drafters.make(draft), TOKENS))
    length = max(len(source) for source, _ in examples)
    width = max(len(row) + 1 for _, rows in examples for row in rows)
    calls = 0
    for source, rows in examples:
        found = scripted.decode(drafted, [source], [rows], length=length, width=width)
        wanted = [row for row in rows if row]
        if [ids[:n].tolist() for ids, n in zip(found.tokens[0], found.lengths[0], strict=True) if n] != wanted:
            raise AssertionError("drafts changed an answer")
        assert found.calls is not None, "calls are counted if there are drafts"
        calls += int(found.calls[0])
    return calls / len(examples)


def read(data: Path, which: DataSet, tokenizer: Tokenizer, count: int) -> list[Example]:
    """Reads the first examples that have an answer."""
    found = []
    records: Iterable[tuple[str, Any]] = read_records(data / which.path)
    for _, record in records:
        rows = [ids for row in record["targets"] if (ids := tokenizer.encode(row))]
        source = [*tokenizer.encode(record["source"])[: MAX_SOURCE - 1], EOS]
        if rows:
            found.append(Example(source, rows, tokenizer.encode(which.separator.join(record["targets"]))))
        if len(found) == count:
            break
    return found


def measure(examples: Sequence[Example], draft: str) -> dict[str, float]:
    """The mean numbers of decoder calls for an answer, by decoder."""
    rows = [[*([*row, EOS] for row in e.rows), [EOS]] for e in examples]
    tokens = [[[*e.sequential, EOS]] for e in examples]
    time_max = max(grid.start(i, 1) + len(row) for each in rows for i, row in enumerate(each)) + 1
    pipelined = Pipelined(delay=1, time_max=time_max, sub_max=max(map(len, rows)) + 1, bos=BOS, eos=EOS)
    sequential = Sequential(max_length=max(len(each[0]) for each in tokens), bos=BOS, eos=EOS)
    count = len(examples)
    drafts = [lookup(e.source) for e in examples]
    return {
        "examples": count,
        "sequential": sum(simulated(each, lambda row: []) for each in tokens) / count,
        "sequential, simulated": sum(map(simulated, tokens, drafts)) / count,
        "sequential, product": product(sequential, draft, [(e.source, [e.sequential]) for e in examples]),
        "pipelined": sum(simulated(each, lambda row: []) for each in rows) / count,
        "pipelined, simulated": sum(map(simulated, rows, drafts)) / count,
        "pipelined, product": product(pipelined, draft, [(e.source, e.rows) for e in examples]),
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    heads = list(next(iter(results.values())))
    lines = [f"| decoder calls an answer | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for name, values in results.items():
        cells = [f"{value:g}" if head == "examples" else f"{value:.2f}" for head, value in values.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Measures the data sets, and prints the table."""
    parser = cli.Parser(prog="python -m lab.experiments.drafts", description=__doc__)
    parser.add_argument(
        "--examples", type=cli.whole_number(1, 10**6), metavar="N", help="most examples of each data set"
    )
    drafters_alone = [name for name in DRAFTS[1:] if not drafters.wants(drafters.make(name), "parameters")]
    parser.add_argument("--draft", choices=drafters_alone, default="source", help="pipejax's drafter")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="measure only data sets whose names contain this text"
    )
    parser.add_argument("--json", metavar="FILE", help="file for all figures")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    data = real_data.directory()
    tokenizer = Tokenizer.load(data / "t5_tokenizer")
    results: dict[str, dict[str, Any]] = {}
    for which in SETS:
        if flags.only in which.name:
            count = min(flags.examples or which.examples, which.examples)
            results[which.name] = measure(read(data, which, tokenizer, count), flags.draft)
            cli.note(table({which.name: results[which.name]}).splitlines()[-1])
    print(table(results))
    if flags.json:
        cli.write_output("--json", flags.json, json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    cli.run(main)
