"""The metrics on real documents, compared with the scripts published with One2Branch for the same predictions.

Those scripts (github.com/nju-websoft/One2Branch, `eval_scripts`) round keyphrase F1 to four digits and EM and PM to two
digits of a per cent.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipejax import metrics


def predict(source: str, gold: Sequence[str], number: int) -> list[str]:
    """Correct rows, rows that are correct except for an ending, and pieces of the source, some over 200 characters."""
    words = source.split()
    most = 60 if number % 25 == 0 else 4
    rows: list[str] = []
    for i, row in enumerate(gold):
        if (number + i) % 3:
            rows.append(row)
        elif (number + i) % 2:
            rows.append(row + "s")
        start = (7 * number + 13 * i) % len(words)
        rows.append(" ".join(words[start : start + 1 + (number + i) % most]))
    return rows[: 1 + number % 9]


def scores(name: str, path: Path) -> dict[str, float]:
    """The scores of these predictions."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    # ";" separates phrases in this data set.
    documents = [json.loads(line.replace(b" ; ", b" ")) for line in data.splitlines()]
    sources, gold = [d["source"] for d in documents], [d["targets"] for d in documents]
    predicted = [predict(s, g, n) for n, (s, g) in enumerate(zip(sources, gold, strict=True))]
    return metrics.score(name, sources, gold, predicted)


def test_keyphrase_scores_equal_published_scores(real_data: Path) -> None:
    found = scores("keyphrases", real_data / "kp20k" / "test.jsonl.gz")
    published = {"present_f1@5": 39.23, "present_f1@M": 50.33, "absent_f1@5": 14.93, "absent_f1@M": 28.34}
    assert {key: found[key] for key in published} == pytest.approx(published, abs=0.005, rel=0)


def test_span_scores_equal_published_scores(real_data: Path) -> None:
    found = scores("spans", real_data / "multispanqa" / "test.jsonl")
    published = {"em_precision": 36.88, "em_recall": 46.21, "em_f1": 41.02}
    published |= {"pm_precision": 59.62, "pm_recall": 68.30, "pm_f1": 63.67}
    assert found == pytest.approx(published, abs=0.005, rel=0)
