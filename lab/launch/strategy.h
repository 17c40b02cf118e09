// A step of Algorithm 1 of the paper, equal to `decoding.grid_strategy.Pipelined`; one thread computes an example.
#pragma once

#include "arguments.h"

namespace launch {

DEVICE bool IsOpen(const Example& e, const Row& row, int i) { return i < e.started && row.end == kNever && !e.done; }

DEVICE bool IsEnd(const Numbers& n, int token) {
  bool found = false;
  for (int i = 0; i < kEnds; ++i) found = found || token == n.ends[i];
  return found;
}

// Appends the tokens `answer` [R] of a step's queries to `tokens` [R, T + 1]. See `Pipelined.advance`.
DEVICE void Advance(const Numbers& n, Example& e, Row* rows, const int* answer, int* tokens) {
  if (e.done) return;
  const int time = e.time + 1;
  bool over = true, any_open = false;
  for (int i = 0; i < n.R; ++i) {
    if (IsOpen(e, rows[i], i)) {
      rows[i].last = tokens[i * (n.T + 1) + time] = answer[i];
      if (IsEnd(n, answer[i])) {
        rows[i].end = time;
        if (time == i * n.delay + 1) e.complete = 1;
      } else {
        any_open = true;
      }
    }
    if (i < e.started && rows[i].end == kNever) over = false;
  }
  if (!n.literal) over = over && (e.complete || e.started == n.sub_max);
  e.time = time;
  if (!over && !any_open && n.delay) e.time = Least(Parts(time, n.delay) * n.delay, n.T);
  e.done = over || e.time == n.T;
}

// Opens the next step. See `Pipelined.query`.
DEVICE void Ask(const Numbers& n, Example& e, Row* rows) {
  bool due = (n.delay ? e.time % n.delay == 0 : e.time == 0) && e.started < n.R && !e.done;
  if (!n.literal) due = due && !e.complete;
  const int before = e.started;
  if (due) e.started += n.delay ? 1 : n.R;
  int last_open = -1;
  for (int i = 0; i < n.R; ++i)
    if (IsOpen(e, rows[i], i)) last_open = i;
  for (int i = 0; i < n.R; ++i) {
    Row& row = rows[i];
    const bool ended = row.end != kNever && !row.retired && i < last_open;
    row.live = ended || IsOpen(e, row, i);
    row.fed = i >= before && i < e.started ? n.bos : row.last;
    row.time = ended ? row.end : e.time;
    row.retired |= ended;
  }
}

}  // namespace launch
