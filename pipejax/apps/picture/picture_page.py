"""The page around a picture. page.html has its layout, colours and script; drafts.html has the section about drafts.

Both are instances of `string.Template`. Elements with data-time or data-done are hidden before that time-step; elements
with data-call are hidden before that call, and from the call in data-until on.
"""

import math
from collections.abc import Sequence

from pipejax.apps.markup import STYLE, escape, template
from pipejax.apps.picture import trace_svg
from pipejax.apps.picture.grid_svg import Grid, facts, pitch_of, svg, top_of, width_of
from pipejax.apps.picture.picture_text import INK, mark, text_width
from pipejax.apps.picture.trace_svg import FILL, MARKS, RowCall

LEAST = 920  # pixels; a wider drawing shrinks to the page down to this width, then scrolls
WIDEST = 1500  # maximum width of the page in pixels


def html(
    grid: Grid,
    *,
    source: str = "",
    texts: Sequence[str] | None = None,
    trace: Sequence[Sequence[RowCall]] | None = None,
    title: str = "Pipelined decoding, step by step",
) -> str:
    """Returns a self-contained page that fills the grid step by step.

    Args:
      grid: the grid.
      source: the source's text.
      texts: the text of each row, shown beside it.
      trace: the trace of a record, its calls; None: no section about drafts.
      title: the page's title.
    """
    texts = [" ".join(row) for row in grid.rows] if texts is None else texts
    ends = {cell.row: cell.time for cell in grid.cells if cell.kind == "eos"}
    finished = [ends.get(i, grid.steps) for i in range(len(grid.rows))]
    items = [
        f'<li data-done="{end}" title="{escape(text)}">{escape(text)}</li>'
        for text, end in zip(texts, finished, strict=True)
    ]
    marked = mark(source, texts, finished)
    width, beside = width_of(grid, page=True), math.ceil(15 * max(map(text_width, texts), default=0.0)) + 20
    narrow, drafts = width + 20 + beside + 2 * 32, ""
    if trace is not None:
        drafts = template("pipejax.apps.picture", "drafts.html").substitute(
            facts=escape(trace_svg.facts_of_calls(grid, trace)),
            right=MARKS["accepted"],
            wrong=MARKS["rejected"],
            last=len(trace),
            drawing=trace_svg.draw(grid, trace),
            table=trace_svg.table_of_calls(grid, trace),
        )
    return template("pipejax.apps.picture", "page.html").substitute(
        title=escape(title),
        facts=escape(facts(grid)),
        style=STYLE,
        ink=INK,
        **FILL,
        steps=grid.steps,
        items="".join(items),
        source=f'<section><h2>Source</h2><p class="source">{marked}</p></section>' if source else "",
        drawing=svg(grid, page=True),
        pitch=pitch_of(grid),
        top=top_of(page=True),
        least=LEAST,
        texts=beside,
        widest=WIDEST,
        narrow=narrow if narrow <= WIDEST else 10**5,
        heading="" if trace is None else "<h2>By time-step</h2>",
        drafts=drafts,
    )
