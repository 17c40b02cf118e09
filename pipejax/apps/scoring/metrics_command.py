"""Scores a file of predictions.

    pipejax metrics exact|spans|keyphrases|rouge|... FILE.jsonl

Lines are `{"id", "source", "gold": [row, ...], "pred": [row, ...]}`. Only keyphrases reads the text, from `document` or
else `source`; `id` is optional. For exact, gold and pred may be objects, and `row_names` may list the beginnings of
rows with values. `separator` is the text that joined the rows of a sequential answer. Prints one JSON object of scores
in percent, not rounded, and nothing else on standard output.
"""

import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipejax import metrics
from pipejax.data.lines import Object, id_of, read_file, text_of, texts_of
from pipejax.methods import split_rows, tells_rows_apart
from pipejax.metrics import HEADLINES, Rows, exact
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

logger = logging.getLogger(__name__)

_texts_of = functools.partial(texts_of, blank=True)


class Documents(NamedTuple):
    """The columns of a file of predictions."""

    sources: list[str]
    gold: list[Rows]
    predicted: list[Rows]


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax metrics", description=__doc__)
    parser.add_argument("metric", choices=list(HEADLINES), help="scores to compute")
    parser.add_argument("file", metavar="FILE.jsonl", help="documents with gold and predicted rows")
    flags = parser.parse_args(argv)
    documents = read_documents(flags.file, flags.metric)
    progress = Progress("scoring", len(documents.gold), unit="document")
    scores = metrics.score(flags.metric, *documents, tick=progress.add)
    progress.close()
    print(json.dumps(scores))
    return 0


def read_documents(path: str, metric: str) -> Documents:
    """Reads the documents of a file.

    Raises:
      UserError: a line cannot be scored, an id is repeated, or the file is empty. The message names file and line.
    """
    documents, seen, joined = Documents([], [], []), dict[str, str](), list[str]()
    for place, value in read_file(path):
        name = str(id_of(value, place))
        if name in seen:
            raise UserError(
                f'{place}: "id"', found=f"{name!r} again; it was used in line {seen[name].rpartition(':')[2]}"
            )
        seen[name] = place
        rows: Callable[[Object, str, str], Rows] = _texts_of
        if metric.startswith("exact"):
            rows = functools.partial(_typed, fold_case=metric != "exact")
        documents.gold.append(rows(value, "gold", place))
        separator = text_of(value, "separator", place, blank=True) if "separator" in value else ""
        texts = [] if isinstance(value["gold"], dict) else _texts_of(value, "gold", place)
        if _splits_differently(texts, separator):
            joined.append(place)
        documents.predicted.append(rows(value, "pred", place))
        text = "document" if "document" in value else "source"
        documents.sources.append(text_of(value, text, place, blank=True) if metric.startswith("keyphrases") else "")
    if joined:
        found = f"{len(joined)} of {len(seen)} documents have gold rows that contain the separator of the answers"
        logger.warning(f"{path}: {found}, so no answer can equal them; the first is at {joined[0]}")
    if not documents.gold:
        raise UserError(path, found="no lines", expected="at least one document")
    return documents


def _splits_differently(rows: Sequence[str], separator: str) -> bool:
    """Returns whether splitting the joined rows gives other rows; False if the separator does not tell rows apart."""
    if not tells_rows_apart(separator):
        return False
    parts = split_rows(separator.join(row for row in rows if row.strip()), separator)
    return [" ".join(part.split()) for part in parts] != [" ".join(row.split()) for row in rows if row.strip()]


def _typed(value: Object, key: str, place: str, *, fold_case: bool) -> Rows:
    if isinstance(found := value.get(key), dict):
        return found
    names = _texts_of(value, "row_names", place) if "row_names" in value else []
    rows = _texts_of(value, key, place)
    if isinstance(value.get("gold"), dict) or isinstance(value.get("pred"), dict):
        return rows  # the types of the object's values count
    return exact.named_rows(rows, dict.fromkeys(names, exact.number_or_text), fold_case=fold_case)


if __name__ == "__main__":
    cli.run(main)
