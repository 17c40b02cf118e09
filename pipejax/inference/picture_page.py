"""The page around a picture: how text gets into it, its layout and colours, the script that plays it.

PAGE is a `string.Template`. Elements with data-time or data-done are "off" before that time-step.
"""

import html
import re
import unicodedata
from collections.abc import Sequence

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
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --ink: #e4e8ec; --quiet: #93a0ad; --line: #3a434d; --mark: #6a4736; --accent: #a9a6ea;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1500px; padding: 28px 32px;
  background: var(--page); color: var(--ink); font: 15px/1.5 $font;
}
h1 { margin: 0; font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 12px; font-weight: 600; color: var(--quiet); }
.facts { margin: 2px 0 0; color: var(--quiet); }
section { margin-top: 22px; }
.source { margin: 0; max-width: 92ch; max-height: 13.6em; overflow: auto; line-height: 1.75; }
.source { padding: 5px 5px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
mark { position: relative; margin: 0 -2px; padding: 1px 2px; border-radius: 4px; }
mark { background: var(--mark); color: inherit; transition: background .2s; }
mark.off { background: none; }
mark sup { position: absolute; top: -5px; right: -5px; font-size: 10px; line-height: 1; color: var(--quiet); }
mark.off sup { visibility: hidden; }
.controls { display: flex; align-items: center; gap: 14px; max-width: 640px; }
.controls[hidden] { display: none; }
button { width: 84px; padding: 5px 0; border: 1px solid var(--line); border-radius: 7px; background: none; }
button { color: inherit; font: inherit; cursor: pointer; }
button:hover { border-color: var(--quiet); }
input { flex: 1; min-width: 80px; accent-color: var(--accent); }
output { min-width: 110px; color: var(--quiet); font-variant-numeric: tabular-nums; }
.board { display: flex; align-items: flex-start; gap: 20px; }
.grid { flex: 0 1 auto; min-width: 0; overflow-x: auto; }
.grid svg { display: block; }
.quiet { fill: var(--quiet); }
.grid g, .grid .step { transition: opacity .2s; }
.grid g.off { opacity: 0; }
.grid .step.off { opacity: .2; }
ol { flex: 1 1 260px; min-width: 200px; margin: ${top}px 0 0; padding: 0; list-style: none; }
li { height: ${pitch}px; line-height: ${pitch}px; transition: opacity .2s; }
li { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; }
li.off { opacity: .3; }
@media (max-width: 760px) {
  body { padding: 20px 16px; }
  .board { display: block; }
  ol { margin: 14px 0 0; padding-left: 1.6em; list-style: decimal; }
  li { height: auto; line-height: 1.6; overflow: visible; white-space: normal; }
}
@media (prefers-reduced-motion: reduce) { * { transition: none !important; } }
</style>
</head>
<body>
<h1>$title</h1>
<p class="facts">$facts</p>
$source
<section class="controls" hidden>
<button type="button">Play</button>
<input type="range" min="0" max="$steps" value="$steps" step="1" aria-label="Time-step">
<output>Step $steps of $steps</output>
</section>
<section class="board">
<div class="grid" tabindex="0" role="group" aria-label="The grid">
$drawing</div>
<ol>$items</ol>
</section>
<script>
"use strict";
const [button, slider, output, board, now] =
  ["button", "input", "output", ".grid", ".now"].map((selector) => document.querySelector(selector));
const timed = [...document.querySelectorAll("[data-time], [data-done]")];
const last = Number(slider.max);
const pause = Math.max(180, Math.min(800, 9000 / Math.max(last, 1)));
let timer = null;
function show(step) {
  slider.value = step;
  output.textContent = `Step $${step} of $${last}`;
  for (const element of timed) {
    element.classList.toggle("off", Number(element.dataset.time ?? element.dataset.done) > step);
  }
  now.setAttribute("x", place(step));
}
function place(step) {
  return Number(now.dataset.left) + step * Number(now.dataset.column);
}
function follow() {  // keeps the current step in sight where the grid is wider than the page
  const [left, right] = [board.scrollLeft, board.scrollLeft + board.clientWidth];
  const step = Number(slider.value);
  if (place(step) < left || place(step + 1) > right) board.scrollLeft = place(step) - board.clientWidth / 2;
}
function stop() {
  clearInterval(timer);
  timer = null;
  button.textContent = "Play";
}
function play() {
  if (Number(slider.value) >= last) show(0);
  follow();
  button.textContent = "Pause";
  timer = setInterval(() => {
    if (Number(slider.value) < last) show(Number(slider.value) + 1);
    follow();
    if (Number(slider.value) >= last) stop();
  }, pause);
}
button.addEventListener("click", () => timer ? stop() : play());
slider.addEventListener("input", () => { stop(); show(Number(slider.value)); follow(); });
document.querySelector(".controls").hidden = false;
// PAGE.html?step=N opens at that step.
const asked = Math.round(Number(new URLSearchParams(location.search).get("step") ?? last));
show(Math.min(Math.max(asked || 0, 0), last));
</script>
</body>
</html>
"""


def escape(text: str) -> str:
    """Text for XML and HTML. Control characters, which XML forbids, become their pictures."""
    return html.escape("".join(map(_visible, text)))


def _visible(char: str) -> str:
    code = ord(char)
    if code < 32:
        return chr(0x2400 + code)
    return "\ufffd" if 0xD800 <= code < 0xE000 or code in (0xFFFE, 0xFFFF) else char


def text_width(text: str) -> float:
    """About a text's width in units of its font size: no font is at hand, and pages differ in theirs."""
    return sum(
        0.0
        if unicodedata.combining(c)
        else 1.0
        if unicodedata.east_asian_width(c) in "WF"
        else 0.34
        if c in "iljtfrI.,:;'|!()[] "
        else 0.95
        if c in "mwMW@%—"
        else 0.7
        if c.isupper()
        else 0.62
        for c in text
    )


def shorten(text: str, room: float) -> str:
    """The text, or as much of its beginning as fits with an ellipsis."""
    if text_width(text) <= room:
        return text
    while text and text_width(text) + 0.7 > room:
        text = text[:-1]
    return text.rstrip() + "…"


def mark(source: str, texts: Sequence[str], finished: Sequence[int]) -> str:
    """The source with the rows found in it marked: in order, each after the one before where possible."""
    found: list[tuple[int, int, int]] = []  # start, end, row
    position = 0
    for row, text in enumerate(texts):
        pattern = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
        for match in (pattern.search(source, position), *pattern.finditer(source)) if text else ():
            if match and all(match.end() <= start or end <= match.start() for start, end, _ in found):
                found.append((match.start(), match.end(), row))
                position = match.end()
                break
    parts, position = [], 0
    for start, end, row in sorted(found):
        words = _lines(source[start:end])
        parts.append(_lines(source[position:start]))
        parts.append(f'<mark data-done="{finished[row]}">{words}<sup>{row + 1}</sup></mark>')
        position = end
    return "".join([*parts, _lines(source[position:])])


def _lines(text: str) -> str:
    return "\n".join(map(escape, text.split("\n")))
