"""The tables as Markdown: our measurements, and the numbers of the paper in separate columns."""

from collections.abc import Sequence
from typing import Any

from lab.experiments.tables import paper
from lab.experiments.tables.cells import Cell, Scores, Way
from pipejax.apps.papers.data_sets import PUBLISHED
from pipejax.metrics import HEADLINES

NONE = "–"  # not measured, or not in the paper
Gap = dict[str, tuple[float, float, float]]
Results = dict[tuple[Cell, str, Way], Scores]  # by cell, split and way
LABELS = {
    "em_f1": "EM",
    "pm_f1": "PM",
    "present_f1@5": "present F1@5",
    "present_f1@M": "present F1@M",
    "absent_f1@5": "absent F1@5",
    "absent_f1@M": "absent F1@M",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeLsum": "ROUGE-L",
}


def table_1(statistics: dict[str, dict[str, Any]]) -> str:
    """Table 1, with sizes and words of the data sets; `statistics`: of the test split, with "train" for its size."""
    head = [
        "data set",
        "train",
        "paper",
        "test",
        "paper",
        "words/target",
        "paper",
        "rows",
        "paper",
        "words/row",
        "paper",
    ]
    lines = []
    for task, reported in paper.TABLE_1.items():
        test = statistics.get(task, {})
        ours = [f"{test[key]:,}" if test.get(key) else NONE for key in ("train", "examples")]
        ours += [_number(test.get(key)) for key in ("words_per_target", "rows_per_target", "words_per_row")]
        lines.append([paper.TITLES[task], *_had_company(ours, [_number(value) for value in reported])])
    return "Words and rows are counted in the test split.\n\n" + _markdown(head, lines)


def table_of_scores(
    tasks: Sequence[str],
    sizes: Sequence[str],
    splits: Sequence[str],
    ways: dict[Cell, list[Way]],
    results: Results,
    gaps: dict[tuple[str, str, str], Gap],
) -> str:
    """Tables 2 to 4: quality, speed and memory of both decoders, with a line for each way, and gaps of quality."""
    scores = paper.SCORES[_headline(tasks[0])]
    head = ["data set", "model", "decoder", "dtype"]
    head += [title for split in splits for score in scores for title in (f"{split} {LABELS[score]}", "paper")]
    head += ["documents", "steps", "examples/s", "paper", "peak memory", "paper"]
    lines = []
    for task in tasks:
        for size in sizes:
            both = [Cell(task, size, objective) for objective in ("sequential", "pipelined")]
            pairs = [(cell, way) for cell in both for way in ways.get(cell, [])]
            there = [pair for pair in pairs if any((pair[0], split, pair[1]) in results for split in splits)]
            if not there:
                continue
            for cell, way in pairs:
                if (cell, way) in there or way == ways[cell][0]:
                    lines.append(_line(cell, way, both[0], scores, splits, results))
            if found := {split: gaps[task, size, split] for split in splits if (task, size, split) in gaps}:
                cells = [_interval(found.get(split, {}).get(score)) for split in splits for score in scores]
                dtype = ways[both[0]][0].dtype
                lines.append(["", "", "gap", dtype, *(x for cell in cells for x in (cell, "")), *[""] * 6])
    return _markdown(head, lines) if lines else ""


def table_5(tasks: Sequence[str], size: str, dtype: str, results: Results) -> str:
    """Table 5: the pipelined decoder with several Δt, on the test split."""
    way = Way("pipelined", dtype=dtype)
    scores = paper.SCORES["rougeLsum"]
    head = [
        "data set",
        "Δt",
        *(t for score in scores for t in (LABELS[score], "paper")),
        "steps",
        "examples/s",
        "paper",
    ]
    lines = []
    for task in tasks:
        cells = [Cell(task, size, "pipelined", delay) for delay in paper.DELAYS]
        if sum((cell, "test", way) in results for cell in cells) < 2:
            continue
        for cell in cells:
            found, reported = results.get((cell, "test", way)), paper.TABLE_5.get((task, cell.delay))
            known = reported if size == "base" else None
            ours = [_number(_of(found, score)) for score in scores]
            line = _had_company(ours, [_number(x) for x in known.scores["test"]] if known else [NONE] * len(scores))
            speed = [_number(_of(found, "examples_per_second"), 2), _number(known and known.examples_per_second)]
            lines.append([paper.TITLES[task], str(cell.delay), *line, _number(_of(found, "steps")), *speed])
    return _markdown(head, lines) if lines else ""


def crossed(cells: Sequence[Cell], ways: Sequence[Way], split: str, results: Results) -> str:
    """A table of each model decoded in several ways, which separates the effects of objective and decoder."""
    lines = []
    for cell in cells:
        for way in ways:
            if (found := results.get((cell, split, way))) is None:
                continue
            scores = paper.SCORES[HEADLINES[found["metric"]]]
            named = ", ".join(f"{LABELS[score]} {_number(found[score])}" for score in scores)
            cut = f"{100 * sum(found['truncated'].values()) / found['examples']:.1f} %"
            speed = _number(found["examples_per_second"], 2)
            model = [paper.TITLES[cell.task], cell.size, cell.objective, way.label, way.dtype]
            lines.append([*model, named, _number(found["steps"]), speed, cut])
    head = ["data set", "model", "trained as", "decoded as", "dtype", split, "steps", "examples/s", "cut"]
    return _markdown(head, lines) if lines else ""


def _line(
    cell: Cell, way: Way, sequential: Cell, scores: Sequence[str], splits: Sequence[str], results: Results
) -> list[str]:
    reported = paper.REPORTED.get((cell.task, cell.size, cell.objective)) if way.dtype == "float32" else None
    line = [paper.TITLES[cell.task], cell.size, way.label, way.dtype]
    for split in splits:
        found = results.get((cell, split, way))
        theirs = reported.scores.get(split) if reported else None
        line += _had_company(
            [_number(_of(found, score)) for score in scores],
            [_number(x) for x in theirs] if theirs else [NONE] * len(scores),
        )
    last = splits[-1]
    found, base = results.get((cell, last, way)), results.get((sequential, last, Way("sequential", dtype=way.dtype)))
    line += [_number(_of(found, "examples"), 0), _number(_of(found, "steps"))]
    ours, before = _of(found, "examples_per_second"), _of(base, "examples_per_second")
    pipelined = cell.objective == "pipelined"
    line.append(_speed(ours, ours / before if pipelined and ours and before else None, 2))
    theirs_up = paper.SPEED_UPS.get((cell.task, cell.size)) if pipelined else None
    line.append(_speed(reported.examples_per_second if reported else None, theirs_up, 1))
    return [*line, _memory(found), f"{reported.memory:,} M" if reported and reported.memory else NONE]


def _of(found: Scores | None, key: str) -> float | None:
    return None if found is None else found[key]


def _headline(task: str) -> str:
    return HEADLINES[PUBLISHED[task].metric]


def _had_company(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    return [x for pair in zip(ours, theirs, strict=True) for x in pair]


def _number(value: float | str | None, digits: int = 1) -> str:
    if value is None:
        return NONE
    return value if isinstance(value, str) else f"{value:.{digits}f}"


def _speed(value: float | None, ratio: float | None, digits: int) -> str:
    if value is None:
        return NONE
    return f"{value:.{digits if value < 10 else 1}f}" + (f" ({ratio:.1f}x)" if ratio else "")


def _memory(found: Scores | None) -> str:
    for key, what in (("peak_device_bytes", ""), ("peak_host_bytes", " (process)")):
        if found and key in found:
            return f"{found[key] / 2**20:,.0f} M{what}"
    return NONE


def _interval(found: tuple[float, float, float] | None) -> str:
    return f"{found[0]:+.1f} ({found[1]:+.1f} to {found[2]:+.1f})" if found else NONE


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
