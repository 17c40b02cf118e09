"""The page around a picture: its layout and colours, the script that plays it.

PAGE and DRAFTS are `string.Template`s. Elements with data-time or data-done are "off" before that time-step; those with
data-call before that call, and from the call data-until on.
"""

import math
import string
from collections.abc import Sequence

from pipejax.apps.picture import calls as by_call
from pipejax.apps.picture.calls import FILL, MARKS, Asked
from pipejax.apps.picture.grid import Grid, facts, pitch_of, svg, top_of, width_of
from pipejax.apps.picture.text import FONT, INK, escape, mark, text_width

LEAST = 920  # pixels; a wider drawing shrinks to the page, but not below: it is scrolled
WIDEST = 1500  # pixels of the page

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1d2733; --quiet: #66727f; --line: #d9dee4; --mark: #f8dfd0; --accent: #4b5bb5;
  --out: #a8322b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --ink: #e4e8ec; --quiet: #93a0ad; --line: #3a434d; --mark: #6a4736; --accent: #a9a6ea;
    --out: #f3a79d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: ${widest}px; padding: 28px 32px;
  background: var(--page); color: var(--ink); font: 15px/1.5 $font;
}
h1 { margin: 0; font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 12px; font-weight: 600; color: var(--quiet); }
.facts { margin: 2px 0 0; color: var(--quiet); overflow-wrap: anywhere; }
section { margin-top: 22px; }
.source { margin: 0; max-width: 92ch; max-height: 13.6em; overflow: auto; line-height: 1.75; }
.source { padding: 5px 5px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
mark { position: relative; margin: 0 -2px; padding: 1px 2px; border-radius: 4px; }
mark { background: var(--mark); color: inherit; transition: background .2s; }
mark.off { background: none; }
mark sup { position: absolute; top: -5px; right: -5px; font-size: 10px; line-height: 1; color: var(--quiet); }
mark.off sup { visibility: hidden; }
.controls { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 14px; max-width: 640px; }
.view h2 { margin-bottom: 6px; font-size: 15px; color: var(--ink); }
.view .facts, .view .controls { margin-bottom: 14px; }
.controls[hidden] { display: none; }
button { width: 84px; padding: 5px 0; border: 1px solid var(--line); border-radius: 7px; background: none; }
button { color: inherit; font: inherit; cursor: pointer; }
button:hover { border-color: var(--quiet); }
input { flex: 1; min-width: 80px; accent-color: var(--accent); }
output { min-width: 110px; color: var(--quiet); font-variant-numeric: tabular-nums; }
.board { display: flex; align-items: flex-start; gap: 20px; }
.grid { flex: 0 0 auto; max-width: 100%; overflow-x: auto; }
.grid svg { display: block; max-width: max(100%, ${least}px); height: auto; }
.quiet { fill: var(--quiet); }
.grid g, .grid .step { transition: opacity .2s; }
.grid g.off { opacity: 0; }
.grid .step.off { opacity: .2; }
ol { flex: 1 1 ${texts}px; min-width: 0; margin: ${top}px 0 0; padding: 0; list-style: none; }
li { height: ${pitch}px; line-height: ${pitch}px; transition: opacity .2s; }
li { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; text-align: left; }
li, .source { unicode-bidi: plaintext; }  /* each in the direction of its script */
li.off { opacity: .3; }
rect.out { stroke: var(--out); }
text.out { fill: var(--out); }
.grid g.rejected.past { opacity: .6; }
.grid g.rejected.off { display: none; }
.grid g.own:not(.past) rect, .grid g.accepted:not(.past) rect { stroke: var(--ink); stroke-width: 2.4; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 0 0 14px; color: var(--quiet); font-size: 13px; }
.key { padding: 1px 8px; margin-right: 5px; border: 1px solid; border-radius: 4px; color: $ink; }
.key.own { background: $own; }
.key.accepted { border-radius: 11px; background: $accepted; }
.key.rejected { border: 1px dashed var(--out); color: var(--out); }
.key.fresh { border: 2.4px solid var(--ink); color: inherit; }
details { margin-top: 14px; }
.scroll { overflow-x: auto; }
table { margin-top: 8px; border-collapse: collapse; font-size: 13px; }
th, td { padding: 2px 16px 2px 0; text-align: left; vertical-align: top; font-weight: 400; }
thead th { color: var(--quiet); }
td:nth-child(4) { color: var(--out); }
tbody th { white-space: nowrap; }
@media (max-width: 760px) { body { padding: 20px 16px; } }
@media (max-width: ${narrow}px) {  /* the texts do not fit beside the grid */
  .board { display: block; }
  ol { margin: 14px 0 0; padding-left: 1.6em; list-style: decimal; }
  li { height: auto; line-height: 1.6; overflow: visible; white-space: normal; overflow-wrap: anywhere; }
}
@media (prefers-reduced-motion: reduce) { * { transition: none !important; } }
</style>
</head>
<body>
<h1>$title</h1>
<p class="facts">$facts</p>
$source
<section class="view" id="steps">
$heading
<div class="controls" hidden>
<button type="button">Play</button>
<input type="range" min="0" max="$steps" value="$steps" step="1" aria-label="Time-step">
<output>Step $steps of $steps</output>
</div>
<div class="board">
<div class="grid" tabindex="0" role="group" aria-label="The grid">
$drawing</div>
<ol>$items</ol>
</div>
</section>
$drafts
<script>
"use strict";
// Lets a section play. `place` gives the pixels from left to right of what a step shows, or nothing.
function player(section, parameter, show, place) {
  const [button, slider, output, board] =
    ["button", "input", "output", ".grid"].map((selector) => section.querySelector(selector));
  const last = Number(slider.max);
  const pause = Math.max(180, Math.min(800, 9000 / Math.max(last, 1)));
  let timer = null;
  function go(step) {
    slider.value = step;
    output.textContent = show(step, last);
  }
  function follow() {  // keeps what is new in sight where the grid is wider than the page
    const drawing = board.querySelector("svg");
    const scale = drawing.getBoundingClientRect().width / drawing.viewBox.baseVal.width;
    const edges = place(Number(slider.value));
    const [left, right] = edges?.map((x) => x * scale) ?? [board.scrollLeft, board.scrollLeft];
    if (left < board.scrollLeft || right > board.scrollLeft + board.clientWidth) {
      board.scrollLeft = left - Math.max(board.clientWidth - (right - left), 0) / 2;
    }
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
  }
  function play() {
    if (Number(slider.value) >= last) go(0);
    follow();
    button.textContent = "Pause";
    timer = setInterval(() => {
      if (Number(slider.value) < last) go(Number(slider.value) + 1);
      follow();
      if (Number(slider.value) >= last) stop();
    }, pause);
  }
  button.addEventListener("click", () => timer ? stop() : play());
  slider.addEventListener("input", () => { stop(); go(Number(slider.value)); follow(); });
  section.querySelector(".controls").hidden = false;
  // PAGE.html?step=N opens at that step, PAGE.html?call=N at that call.
  const asked = Math.round(Number(new URLSearchParams(location.search).get(parameter) ?? last));
  go(Math.min(Math.max(asked || 0, 0), last));
}
{
  const now = document.querySelector(".now");
  const timed = [...document.querySelectorAll("[data-time], [data-done]")];
  const left = (step) => Number(now.dataset.left) + step * Number(now.dataset.column);
  player(document.querySelector("#steps"), "step", (step, last) => {
    for (const element of timed) {
      element.classList.toggle("off", Number(element.dataset.time ?? element.dataset.done) > step);
    }
    now.setAttribute("x", left(step));
    return `Step $${step} of $${last}`;
  }, (step) => [left(step), left(step + 1)]);
}
const drafts = document.querySelector("#calls");
if (drafts) {
  const called = [...drafts.querySelectorAll("[data-call]")];
  const sums = [...drafts.querySelectorAll("[data-sum]")];
  const of = (call) => called.filter((element) => Number(element.dataset.call) === call);
  player(drafts, "call", (call, last) => {
    for (const {classList, dataset} of called) {
      classList.toggle("off", Number(dataset.call) > call || Number(dataset.until ?? Infinity) <= call);
      classList.toggle("past", Number(dataset.call) < call);
    }
    const count = (elements) => {
      const [accepted, rejected] = ["accepted", "rejected"].map(
        (kind) => elements.filter((element) => element.classList.contains(kind)).length);
      return accepted + rejected ? `$${accepted} of $${accepted + rejected}` : "";
    };
    for (const sum of sums) {  // of a row, so far
      sum.textContent = count(called.filter(({dataset}) => dataset.row === sum.dataset.sum && dataset.call <= call));
    }
    const found = count(of(call));
    return `Call $${call} of $${last}: $${found ? found + " drafted accepted" : "nothing drafted"}`;
  }, (call) => {
    const boxes = of(call).map((element) => element.querySelector("rect"));
    const edges = boxes.map((box) => [Number(box.getAttribute("x")), Number(box.getAttribute("width"))]);
    return boxes.length ? [Math.min(...edges.map(([x]) => x)), Math.max(...edges.map(([x, w]) => x + w))] : null;
  });
}
</script>
</body>
</html>
"""

DRAFTS = """<section class="view" id="calls">
<h2>By decoder call</h2>
<p class="facts">$facts</p>
<p class="legend">
<span><span class="key own">token</span>written without a draft</span>
<span><span class="key accepted">${right}token</span>draft, accepted</span>
<span><span class="key rejected">${wrong}token</span>draft, not accepted: wrong, or ahead of a row above;
faint: of an earlier call</span>
<span><span class="key fresh">token</span>of this call</span>
</p>
<div class="controls" hidden>
<button type="button">Play</button>
<input type="range" min="0" max="$last" value="$last" step="1" aria-label="Decoder call">
<output>Call $last of $last</output>
</div>
<div class="grid" tabindex="0" role="group" aria-label="The grid by decoder call">
$drawing</div>
<details>
<summary>The calls in words</summary>
<div class="scroll" tabindex="0" role="group" aria-label="The calls in words">$table</div>
</details>
</section>"""


def html(
    grid: Grid,
    *,
    source: str = "",
    texts: Sequence[str] | None = None,
    calls: Sequence[Sequence[Asked]] | None = None,
    highlight: bool = True,
    title: str = "Pipelined decoding, step by step",
) -> str:
    """One page that loads nothing from elsewhere and fills the grid step by step.

    Args:
      grid: what is drawn.
      source: the document, shown above the grid.
      texts: the text of each row, shown beside it; default: its tokens with spaces between them.
      calls: of each decoder call the rows that were asked, if it is to be shown what became of drafts.
      highlight: mark the rows that occur in the source.
      title: the page's.
    """
    texts = [" ".join(row) for row in grid.rows] if texts is None else texts
    ends = {cell.row: cell.time for cell in grid.cells if cell.kind == "eos"}
    finished = [ends.get(i, grid.steps) for i in range(len(grid.rows))]
    items = [
        f'<li data-done="{end}" title="{escape(text)}">{escape(text)}</li>'
        for text, end in zip(texts, finished, strict=True)
    ]
    marked = mark(source, texts if highlight else [], finished)
    width, beside = width_of(grid, page=True), math.ceil(15 * max(map(text_width, texts), default=0.0)) + 20
    narrow = width + 20 + beside + 2 * 32
    return string.Template(PAGE).substitute(
        title=escape(title),
        facts=escape(facts(grid)),
        font=FONT,
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
        heading="" if calls is None else "<h2>By time-step</h2>",
        drafts="" if calls is None else _drafts(grid, calls),
    )


def _drafts(grid: Grid, calls: Sequence[Sequence[Asked]]) -> str:
    return string.Template(DRAFTS).substitute(
        facts=escape(by_call.facts(grid, calls)),
        right=MARKS["accepted"],
        wrong=MARKS["rejected"],
        last=len(calls),
        drawing=by_call.draw(grid, calls),
        table=by_call.table(grid, calls),
    )
