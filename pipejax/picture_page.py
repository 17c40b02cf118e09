"""The page around the picture of a grid: layout, light and dark colours, and the script that plays it.

A `string.Template`. Elements with data-time or data-done are "off" before that time-step.
"""

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
  :root { --page: #14181d; --ink: #e4e8ec; --quiet: #93a0ad; --line: #3a434d; --mark: #6a4736; --accent: #a9a6ea; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1500px; padding: 28px 32px;
  background: var(--page); color: var(--ink); font: 15px/1.5 $font;
}
h1 { margin: 0; font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 12px; font-weight: 600; color: var(--quiet); }
.facts { margin: 2px 0 0; color: var(--quiet); }
section { margin-top: 22px; }
.source { margin: 0; max-width: 92ch; max-height: 13.6em; overflow: auto; line-height: 1.75; }
.source { white-space: pre-wrap; overflow-wrap: anywhere; }
mark { position: relative; margin: 0 -3px; padding: 1px 3px; border-radius: 4px; }
mark { background: var(--mark); color: inherit; transition: background .2s; }
mark.off { background: none; }
mark sup { position: absolute; top: -7px; right: -3px; font-size: 9px; line-height: 1; color: var(--quiet); }
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
const [button, slider, output, now] =
  ["button", "input", "output", ".now"].map((selector) => document.querySelector(selector));
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
  now.setAttribute("x", Number(now.dataset.left) + step * Number(now.dataset.column));
}
function stop() {
  clearInterval(timer);
  timer = null;
  button.textContent = "Play";
}
function play() {
  if (Number(slider.value) >= last) show(0);
  button.textContent = "Pause";
  timer = setInterval(() => {
    if (Number(slider.value) < last) show(Number(slider.value) + 1);
    if (Number(slider.value) >= last) stop();
  }, pause);
}
button.addEventListener("click", () => timer ? stop() : play());
slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
document.querySelector(".controls").hidden = false;
// PAGE.html?step=N opens at that step.
const asked = Math.round(Number(new URLSearchParams(location.search).get("step") ?? last));
show(Math.min(Math.max(asked || 0, 0), last));
</script>
</body>
</html>
"""
