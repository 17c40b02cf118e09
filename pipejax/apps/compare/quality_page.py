"""Draws scores against seconds as a self-contained HTML page; quality.html has the layout and the colours."""

import importlib.resources
import string
from collections.abc import Callable, Sequence

from pipejax.apps.compare.measurement import Results
from pipejax.system.markup import FONT, count, escape, ticks_around
from pipejax.system.strict_json import JsonMapping

COLOURS = 8  # number of colours for entries; further entries reuse them
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
    legend = "".join(
        f'<span class="entry"><svg width="12" height="12"><circle class="c{i % COLOURS}" cx="6" cy="6" r="5"/></svg>'
        f"{escape(result.entry.name)}</span>"
        for i, result in enumerate(results)
    )
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    lines = [cells(result, headline) for result in results]
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    facts = (
        f"{count(int(about['examples']), 'example')} of the {about['split']} split of {about['task']}, "
        f"{about['batch_size']} at a time, on {about['device']}. "
        f"Intervals: {about['confidence']:.0%} of {about['bootstrap_samples']:,} bootstrap samples "
        f"(seed {about['bootstrap_seed']})."
    )
    template = importlib.resources.files("pipejax.apps.compare").joinpath("quality.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        title=escape(f"{headline} against time"),
        font=FONT,
        facts=escape(facts),
        legend=legend,
        chart=chart(results, headline),
        table=f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
    )


def chart(results: Sequence[Results], headline: str) -> str:
    """Returns the chart as SVG: one point for each entry, with the interval of its score as a vertical bar.

    The horizontal axis begins at 0 milliseconds. The vertical axis has the range of the intervals.
    """
    times = [1000 * result.seconds for result in results]
    scores = [result.scores[headline] for result in results]
    lowest, highest = min(low for _, low, _ in scores), max(high for *_, high in scores)
    rows = ticks_around(lowest, max(highest, lowest + 0.1))
    columns = ticks_around(0, max(times), 8)
    bottom, top, right = rows[0], rows[-1], columns[-1]

    def x_of(milliseconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * milliseconds / right

    def y_of(score: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - score) / (top - bottom)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="12">']
    for value in rows:
        y = y_of(value)
        parts.append(f'<path class="line" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    for value in columns:
        place = f'x="{x_of(value):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        parts.append(f'<text class="quiet" {place} text-anchor="middle">{value:.6g}</text>')
    middle = f'x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 6}"'
    parts.append(f'<text class="quiet" {middle} text-anchor="middle">milliseconds for an example</text>')
    for i, (result, time, (score, low, high)) in enumerate(zip(results, times, scores, strict=True)):
        x, kind = x_of(time), f'class="c{i % COLOURS}"'
        tip = f"<title>{escape(result.entry.name)}: {headline} {score:.2f}, {time:.1f} ms</title>"
        parts.append(f'<path {kind} d="M{x:.1f} {y_of(low):.1f}V{y_of(high):.1f}">{tip}</path>')
        parts.append(f'<circle {kind} cx="{x:.1f}" cy="{y_of(score):.1f}" r="5">{tip}</circle>')
    return "".join([*parts, "</svg>"])
