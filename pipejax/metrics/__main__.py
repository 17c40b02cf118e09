"""Scores a file of predictions.

    pipejax metrics exact|spans|keyphrases|rouge|... FILE.jsonl

Lines are `{"id", "source", "gold": [row, ...], "pred": [row, ...]}`; `document`, or else `source`, is read by
keyphrases alone, and `id` may be left out. For exact, gold and pred may be objects, and `row_names` the beginnings of
rows with values. Prints one JSON object of scores in percent, not rounded, and nothing else on standard output.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipejax import metrics
from pipejax.data.lines import Object, id_of, read_file, text_of, texts_of
from pipejax.metrics import HEADLINES, Rows, exact
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

_texts_of = functools.partial(texts_of, blank=True)


class Documents(NamedTuple):
    sources: list[str]
    gold: list[Rows]
    predicted: list[Rows]


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax metrics", description=__doc__)
    parser.add_argument("metric", choices=list(HEADLINES), help="the family of scores")
    parser.add_argument("file", metavar="FILE.jsonl", help="documents with their gold and predicted rows")
    flags = parser.parse_args(argv)
    documents = read_documents(flags.file, flags.metric)
    progress = Progress("scoring", len(documents.gold), unit="document")
    scores = metrics.score(flags.metric, *documents, tick=progress.add)
    progress.close()
    print(json.dumps(scores))
    return 0


def read_documents(path: str, metric: str) -> Documents:
    """Raises a UserError naming file and line for anything that cannot be scored, a repeated id or an empty file."""
    documents, seen = Documents([], [], []), dict[str, str]()
    for place, value in read_file(path):
        name = str(id_of(value, place))
        if name in seen:
            raise UserError(f'{place}: "id": found {name!r} again; it was used in line {seen[name].rpartition(":")[2]}')
        seen[name] = place
        rows: Callable[[Object, str, str], Rows] = _texts_of
        if metric.startswith("exact"):
            rows = functools.partial(_typed, fold_case=metric != "exact")
        documents.gold.append(rows(value, "gold", place))
        documents.predicted.append(rows(value, "pred", place))
        text = "document" if "document" in value else "source"
        documents.sources.append(text_of(value, text, place, blank=True) if metric.startswith("keyphrases") else "")
    if not documents.gold:
        raise UserError(f"{path}: found no lines; expected at least one document")
    return documents


def _typed(value: Object, key: str, place: str, *, fold_case: bool) -> Rows:
    if isinstance(found := value.get(key), dict):
        return found
    names = _texts_of(value, "row_names", place) if "row_names" in value else []
    rows = _texts_of(value, key, place)
    if isinstance(value.get("gold"), dict) or isinstance(value.get("pred"), dict):
        return rows  # the types of that object count
    return exact.named_rows(rows, dict.fromkeys(names, exact.number_or_text), fold_case=fold_case)


if __name__ == "__main__":
    cli.run(main)
