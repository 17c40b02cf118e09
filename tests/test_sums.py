"""The bootstrap of scores is compared with the normal approximation and hand-computed cases."""

import math
import statistics

import numpy as np
import pytest

from pipejax import metrics
from pipejax.apps.compare.bootstrap import bootstrap, gap
from pipejax.metrics import keyphrases, spans, total


def mean(sums, count):
    return {"x": sums["x"] / count}


def test_interval_of_a_mean_equals_the_normal_approximation():
    rng = np.random.default_rng(0)
    first = rng.normal(0.3, 1.0, 400)
    second = first + rng.normal(0.2, 0.5, 400)
    found = bootstrap([{"x": x} for x in first], [{"x": x} for x in second], mean)["x"]
    gaps = second - first
    half = 1.96 * statistics.stdev(gaps) / math.sqrt(len(gaps))
    assert found[0] == pytest.approx(gaps.mean())
    assert found[1:] == pytest.approx((gaps.mean() - half, gaps.mean() + half), abs=0.15 * half)


def test_documents_are_paired():
    """Both systems vary much between documents, and always by the same amount: the difference is certain."""
    first = [{"x": float(i % 7)} for i in range(50)]
    second = [{"x": d["x"] + 2.0} for d in first]
    assert bootstrap(first, second, mean)["x"] == pytest.approx((2.0, 2.0, 2.0))


def test_ratio_of_sums_is_computed_in_each_sample():
    """In micro-averages long documents weigh more, also in samples."""
    gold = [["a", "b", "c", "d"]] * 10 + [["a"]] * 90
    right = [["a", "b", "c", "d"]] * 10 + [["z"]] * 90
    wrong = [["z"]] * 100
    (difference, low, high) = gap("spans", [""] * 100, gold, wrong, right)["em_f1"]
    assert difference == pytest.approx(100 * 40 / 130)
    # A sample has k ~ Binomial(100, 0.1) of the long documents, and scores 4 k / (100 + 3 k).
    rng = np.random.default_rng(1)
    drawn = 100 * 4 * (k := rng.binomial(100, 0.1, 20_000)) / (100 + 3 * k)
    assert (low, high) == pytest.approx(tuple(np.percentile(drawn, (2.5, 97.5))), abs=1.5)


@pytest.mark.parametrize("name", list(metrics.HEADLINES))
def test_scores_equal_sums_of_documents(name):
    gold, predicted = [["a b", "c"], ["d"], []], [["a b"], ["d", "e"], ["f"]]
    sources = ["a b", "d", "f"]
    documents = metrics.per_document(name, sources, gold, predicted)
    assert metrics.combine(name, total(documents), 3) == metrics.score(name, sources, gold, predicted)
    found = gap(name, sources, gold, predicted, gold)
    perfect = metrics.score(name, sources, gold, gold)
    assert {key: value[0] for key, value in found.items()} == pytest.approx(
        {key: perfect[key] - value for key, value in metrics.score(name, sources, gold, predicted).items()}
    )


def test_bootstrap_needs_equal_documents():
    with pytest.raises(ValueError, match="expected the same documents twice; got 0 and 0"):
        bootstrap([], [], mean)
    with pytest.raises(ValueError, match="got 2 and 1"):
        bootstrap([{"x": 1.0}] * 2, [{"x": 1.0}], mean)
    assert spans.combine({}, 0) == metrics.score("spans", [], [], [])
    assert keyphrases.combine({}, 0) == metrics.score("keyphrases", [], [], [])
