"""Draws scores against seconds as a self-contained HTML page; quality.html has the layout."""

from collections.abc import Callable, Sequence

from pipejax.apps.compare.measurement import Results
from pipejax.apps.markup import (
    CHART_STYLE,
    COLOURS,
    STYLE,
    Chart,
    count,
    escape,
    legend,
    table,
    template,
    ticks_around,
)
from pipejax.system.strict_json import JsonMapping

DOT = '<svg width="12" height="12"><circle class="$c" cx="6" cy="6" r="5"/></svg>'  # the mark of an entry in the legend
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 380, 64, 24, 16, 44  # pixels of the chart, and of its margins


def page(
    results: Sequence[Results],
    about: JsonMapping,
    header: Sequence[str],
    cells: Callable[[Results, str], Sequence[str]],
) -> str:
    """Returns the page as HTML.

    Args:
      results: the results of all entries.
      about: the facts of the comparison, as in the JSON output.
      header: the names of the table's columns.
      cells: returns the cells of an entry, given the name of the headline score.
    """
    headline = str(about["headline"])
    facts = (
        f"{count(int(about['examples']), 'example')} of the {about['split']} split of {about['task']}, "
        f"{about['batch_size']} at a time, on {about['device']}. "
        f"Intervals: {about['confidence']:.0%} of {about['bootstrap_samples']:,} bootstrap samples "
        f"(seed {about['bootstrap_seed']})."
    )
    return template("pipejax.apps.compare", "quality.html").substitute(
        title=escape(f"{headline} against time"),
        style=f"{STYLE}\n{CHART_STYLE}",
        facts=escape(facts),
        legend=legend((result.entry.name for result in results), DOT),
        chart=chart(results, headline),
        table=table(header, (cells(result, headline) for result in results)),
    )


def chart(results: Sequence[Results], headline: str) -> str:
    """Returns the chart as SVG: one point for each entry, with the interval of its score as a vertical bar.

    The horizontal axis begins at 0 milliseconds. The vertical axis covers all intervals, and at least one point of the
    score below the highest end of an interval.
    """
    times = [1000 * result.seconds for result in results]
    scores = [result.scores[headline] for result in results]
    lowest, highest = min(low for _, low, _ in scores), max(high for *_, high in scores)
    rows = ticks_around(min(lowest, highest - 1), highest)
    columns = ticks_around(0, max(times), 8)
    axes = Chart(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, last=columns[-1], low=rows[0], high=rows[-1])
    middle = f'x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 6}"'
    parts = [f'<text class="quiet" {middle} text-anchor="middle">milliseconds for an example</text>']
    for i, (result, time, (score, low, high)) in enumerate(zip(results, times, scores, strict=True)):
        x, kind = axes.x(time), f'class="c{i % COLOURS}"'
        tip = f"<title>{escape(result.entry.name)}: {headline} {score:.2f}, {time:.1f} ms</title>"
        parts.append(f'<path {kind} d="M{x:.1f} {axes.y(low):.1f}V{axes.y(high):.1f}">{tip}</path>')
        parts.append(f'<circle {kind} cx="{x:.1f}" cy="{axes.y(score):.1f}" r="5">{tip}</circle>')
    return axes.svg(rows, [(value, f"{value:.6g}") for value in columns], BOTTOM - 18, parts)
