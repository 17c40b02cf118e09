"""Decodes examples and scores them."""

from collections.abc import Callable, Sequence
from typing import Any

from pipejax import metrics
from pipejax.data import make_task
from pipejax.data.core import Example
from pipejax.generate import Generator, Record, Report, Source


def evaluate(
    generator: Generator,
    examples: Sequence[Example],
    *,
    strategy: str | None = None,
    metric: str | None = None,
    batch_size: int = 8,
    tick: Callable[[int], None] = lambda count: None,
) -> tuple[dict[str, Any], list[Record]]:
    """Decodes the examples and compares rows with targets.

    Args:
      generator: holds the weights and the settings.
      examples: not empty.
      strategy: None: the generator's default.
      metric: one of `metrics.HEADLINES`; None: that of the generator's config.
      batch_size: examples decoded together.
      tick: called with the number of examples done since the last call.

    Returns:
      metric and its scores (percent), steps, sequential_steps and pipelined_steps (means; the other strategy's are the
      ideal for the same rows), step_ratio, examples_per_second (compilation left out), compile_seconds, truncated and
      cut_sources (counts); and the records.
    """
    name = strategy or generator.default_strategy
    report, sources = Report(), [Source(e.id, e.source) for e in examples]
    records = list(generator.stream(sources, strategy=name, batch_size=batch_size, report=report, tick=tick))
    metric = metric or make_task(generator.config.data).metric
    gold, predicted = [e.targets for e in examples], [record["rows"] for record in records]
    scores = metrics.score(metric, [e.source for e in examples], gold, predicted)
    result = {
        "strategy": name,
        "examples": len(examples),
        "metric": metric,
        **scores,
        **report.summary(name),
    }
    return result, records
