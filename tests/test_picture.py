"""The picture shows the paper's times, is well-formed with any tokens, and loads nothing."""

import dataclasses
import itertools
import json
import random
import re
import shutil
import xml.etree.ElementTree as ET
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pipejax import config
from pipejax.apps.picture import html, svg
from pipejax.apps.picture.grid_svg import LEFT, Cell, fill
from pipejax.apps.picture.picture_text import shorten, text_width
from pipejax.apps.picture.record_picture import main
from pipejax.apps.picture.trace_svg import RowCall
from pipejax.data.tokenizer import Tokenizer
from pipejax.methods import PipelinedMethod
from pipejax.system.errors import UserError
from support import oracle, tiny, wavefront

FIGURE_2 = [["A", "B", "C"], ["D", "E"]]
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "</script>",
    "a&b",
    '"quoted"',
    "'",
    "\x00\x1b",
    "\n",
    "\ud800",
    "中文",
    "e\u0301",
    "\uffff",
    "$step",
    "${x}",
]
HOSTILE += ["<rect/>", "pneumonoultramicroscopicsilicovolcanoconiosis"]


def cells_of(drawing: str) -> list[ET.Element]:
    return [g for g in ET.fromstring(drawing).iter(f"{SVG}g") if g.get("data-time")]


def number(element: ET.Element | None, name: str) -> float:
    assert element is not None
    return float(element.get(name, "nan"))


def texts_of(drawing: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(drawing).iter(f"{SVG}text")]


def test_picture_of_figure_2_has_the_papers_times() -> None:
    """The paper's example has 1, 2 and 2 tokens at steps 1-3, all eos by step 4, and "D" at the time of "B"."""
    grid = fill(FIGURE_2, delay=1)
    assert grid.steps == 4
    tokens = ["".join(c.text for c in grid.cells if c.time == t and c.kind == "token") for t in range(5)]
    assert tokens == ["", "A", "BD", "CE", ""]
    ends = [Cell(row, time, "eos", "eos") for row, time in ((0, 4), (1, 4), (2, 3))]
    assert [c for c in grid.cells if c.kind == "eos"] == ends
    assert [(c.row, c.time) for c in grid.cells if c.kind == "bos"] == [(0, 0), (1, 1), (2, 2)]
    assert grid.sequential == (1, 2, 3, 0, 2, 3, 0)  # A B C <sep> D E eos


@pytest.mark.parametrize(
    "rows, options, steps, last_row, eos_times",
    [
        ([], {"delay": 1}, 1, 0, [1]),
        ([["a"]], {"delay": 3}, 4, 1, [2, 4]),
        ([["a"] * 2, ["b"] * 3], {"delay": 0}, 4, 1, [3, 4]),  # rows start together, without an empty row
        ([["a"] * 5, ["b"]], {"delay": 2, "truncated": "sub_max"}, 6, 1, [6, 4]),  # nothing after the second row
        ([["a"] * 4, ["b"]], {"delay": 1, "truncated": "time_max"}, 4, 2, [3, 3]),  # the first row is truncated
        # Both rows are truncated, and row 3 did not begin.
        ([["a"] * 4, ["b"]], {"delay": 3, "truncated": "time_max"}, 4, 1, [0]),
        ([["a"]], {"delay": 5, "truncated": "time_max", "steps": 5}, 5, 0, [2]),  # row 2 would start at 5
        ([["a"] * 4, ["b"]], {"delay": 4, "steps": 6}, 6, 1, [5, 6]),  # the literal stop, before the empty row
    ],
)
def test_grid_has_the_end_tokens_and_the_last_row(
    rows: list[list[str]], options: dict[str, Any], steps: int, last_row: int, eos_times: list[int]
) -> None:
    grid = fill(rows, **options)
    assert (grid.steps, grid.height) == (steps, last_row + 1)
    assert [c.time for c in grid.cells if c.kind == "eos"] == [t for t in eos_times if t]


def test_steps_equal_the_papers_formula() -> None:
    rng = random.Random(0)
    for _ in range(100):
        delay, lengths = rng.randint(1, 4), [rng.randint(1, 9) for _ in range(rng.randint(0, 6))]
        grid = fill([["x"] * n for n in lengths], delay=delay)
        n = len(lengths)
        assert grid.steps == max([(i - 1) * delay + m + 1 for i, m in enumerate(lengths, start=1)] + [n * delay + 1])
        assert len(grid.sequential) == sum(lengths) + max(n - 1, 0) + 1
        assert len({(c.row, c.time) for c in grid.cells}) == len(grid.cells)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="delay: expected at least 0; got -1"):
        fill([], delay=-1)
    with pytest.raises(ValueError, match="truncated: expected None"):
        fill([], delay=1, truncated="max_length")


def test_svg_places_cells_by_time_and_row() -> None:
    grid = fill(FIGURE_2, delay=1)
    lefts, tops, colours = (defaultdict[int, set[Any]](set) for _ in range(3))
    for cell, drawn in zip(grid.cells, cells_of(svg(grid)), strict=True):
        box = drawn.find(f"{SVG}rect")
        assert box is not None
        lefts[cell.time].add(number(box, "x"))
        tops[cell.row].add(number(box, "y"))
        if cell.kind == "token":
            colours[cell.time].add(box.get("fill"))
    assert all(len(values) == 1 for values in [*lefts.values(), *tops.values()])
    across = [lefts[t].pop() for t in sorted(lefts)]
    assert len({b - a for a, b in itertools.pairwise(across)}) == 1  # a step has one width
    assert [len(colours[t]) for t in (1, 2, 3)] == [1, 1, 1]
    assert len(colours[1] | colours[2] | colours[3]) == 3
    assert {"4 steps", "7 steps", "row 1", "row 2", "empty row"} <= set(texts_of(svg(grid)))


def test_widths_of_letters_are_estimated() -> None:
    assert text_width("i") < text_width("a") < text_width("A") < text_width("m") < text_width("漢")
    assert text_width("e\u0301") == text_width("e")  # a combining accent has no width


@pytest.mark.parametrize("rows, steps", [(20, 50), (1, 1), (1, 120), (40, 3)])
def test_svg_keeps_everything_inside_and_apart(rows: int, steps: int) -> None:
    rng = random.Random(0)
    words = ["internationalisation", "of", "▁the", "W" * 30]
    tokens = [rng.choices(words, k=rng.randint(1, steps)) for _ in range(rows)]
    drawn = svg(fill(tokens, delay=1))
    root = ET.fromstring(drawn)
    width, height = number(root, "width"), number(root, "height")
    boxes = []
    for g in cells_of(drawn):
        box, label = g.find(f"{SVG}rect"), g.find(f"{SVG}text")
        x, y, w, h = (number(box, name) for name in ("x", "y", "width", "height"))
        assert LEFT <= x <= width - w and 0 <= y <= height - h
        assert label is not None and label.text is not None
        assert text_width(label.text) * number(label, "font-size") <= w
        assert number(label, "font-size") >= 10
        boxes.append((x, y))
    assert len(set(boxes)) == len(boxes)
    assert all(number(r, "x") + number(r, "width") <= width for r in root.iter(f"{SVG}rect"))


def test_long_tokens_are_shortened_and_whole_in_the_tooltip() -> None:
    token = "pneumonoultramicroscopic"
    drawn = svg(fill([[token] * 3], delay=1))
    assert any(text.startswith("pneumono") and text.endswith("…") for text in texts_of(drawn))
    titles = [title.text or "" for title in ET.fromstring(drawn).iter(f"{SVG}title")]
    assert f"row 1, time-step 2: {token}" in titles
    assert (shorten("abc", 9), shorten("", 0)) == ("abc", "")


def test_svg_survives_any_token() -> None:
    drawn = svg(fill([HOSTILE, [""]], delay=2))
    drawn.encode("utf-8")
    shown = " ".join(title.text or "" for title in ET.fromstring(drawn).iter(f"{SVG}title"))
    assert "</script>" in shown and "␀␛" in shown


class Page(HTMLParser):
    """The elements of a page, and the resources that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads, self.items, self.open = (list[str]() for _ in range(3))
        self.marks, self.source = list[tuple[str, str]](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.loads += [f"{tag} {name}" for name in given if name in ("src", "href", "xlink:href", "action")]
        if tag in ("mark", "sup", "li", "p"):
            self.open.append(tag if given.get("class") != "source" else "source")
        if tag == "mark":
            self.marks.append((str(given["data-done"]), ""))
        if tag == "li":
            self.items.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("mark", "sup", "li", "p"):
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["mark"]:
            self.marks[-1] = (self.marks[-1][0], self.marks[-1][1] + data)
        if "source" in self.open and "sup" not in self.open:
            self.source += data
        if self.open[-1:] == ["li"]:
            self.items[-1] += data


def test_html_is_one_page_that_loads_nothing() -> None:
    text = html(fill([HOSTILE, ["x"]], delay=1), source="\n".join(HOSTILE), title="</title>$x")
    text.encode("utf-8")
    page = Page(text)
    assert page.loads == []
    assert "@import" not in text and "url(" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert text.count("</script>") == 1
    shown = {0: "␀", 27: "␛", 10: "␊", 0xD800: "\ufffd", 0xFFFF: "\ufffd"}
    assert page.items == [" ".join(HOSTILE).translate(shown), "x"]


@pytest.mark.parametrize("length", [1, 6, 12, 60])
def test_texts_are_beside_the_grid_only_if_both_fit(length: int) -> None:
    """Texts are shown in windows wider than the limit in the style; no limit exceeds the widest page."""
    row = ["words"] * length
    text = html(fill([row], delay=1))
    drawn = int(re.search(r'<svg [^>]*width="(\d+)"', text)[1])  # type: ignore[index]
    least = int(re.search(r"max-width: (\d+)px\) \{  /\* the texts", text)[1])  # type: ignore[index]
    needed = drawn + 20 + 15 * 0.4 * len(" ".join(row)) + 2 * 32
    assert least >= needed and (needed <= 1500 or least > 10_000)


def test_html_holds_the_source_and_marks_its_rows() -> None:
    source = "deliver red apples . red applesauce ,\nred apples & pears <now> ."
    rows = [["red", "apples"], ["pears"], ["plums"], ["red", "apples"]]
    page = Page(html(fill(rows, delay=1), source=source))
    assert page.source == source
    # Rows end with eos: row 1 at step 3, row 2 at 1 + 2, row 4 at 3 + 3. The sauce is no "red apples"; the
    # fourth row matches the second "red apples", although row 2 is after them.
    assert page.marks == [("3", "red apples"), ("6", "red apples"), ("3", "pears")]
    assert page.items == ["red apples", "pears", "plums", "red apples"]
    assert Page(html(fill(rows, delay=1))).source == ""


def test_html_rows_have_the_height_of_grid_rows() -> None:
    drawn = html(fill(FIGURE_2, delay=1), texts=["abc", "de"])
    assert Page(drawn).items == ["abc", "de"]
    picture = drawn[drawn.index("<svg") : drawn.index("</svg>") + len("</svg>")]
    rows = [number(g.find(f"{SVG}rect"), "y") for g in cells_of(picture)]
    pitch = sorted(set(rows))[1] - sorted(set(rows))[0]
    assert f"li {{ height: {pitch:g}px; line-height: {pitch:g}px" in drawn
    assert f"margin: {min(rows) - 3:g}px 0 0" in drawn


RECORD = {"id": "x", "text": "a b ; c", "rows": ["a b", "c"], "row_ids": [[5, 6], [7]], "steps": 3, "truncated": None}
# A record of any method.
ONE_ROW = {"id": "x", "text": "a", "rows": ["a"], "row_ids": [[5]], "steps": 2, "truncated": None}


def draw(tmp_path: Path, record: dict[str, Any] | str, *flags: str, output: str = "x.svg") -> str:
    line = record if isinstance(record, str) else json.dumps(record)
    (tmp_path / "records.jsonl").write_text('{"id": "first"}\n\n' + line + "\n")
    wanted = () if "--id" in flags else ("--id", "x")
    assert main([str(tmp_path / "records.jsonl"), "--output", str(tmp_path / output), *wanted, *flags]) == 0
    return (tmp_path / output).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "change, shown",
    [
        ({}, ["a", "b", "c"]),
        ({"row_tokens": [["▁a", "▁b"], ["▁c"]]}, ["▁a", "▁b", "▁c"]),
        ({"rows": ["ab", "c"]}, ["piece 1", "piece 2", "c"]),  # word pieces, names unknown
        ({"rows": None, "text": None}, ["5", "6", "7"]),  # decoded without a tokenizer
    ],
)
def test_command_shows_tokens(tmp_path: Path, change: dict[str, Any], shown: list[str]) -> None:
    drawn = draw(tmp_path, RECORD | change)
    assert [text for text in texts_of(drawn) if text in shown] == shown


def test_command_shows_the_tokens_of_a_checkpoint(tmp_path: Path, tokenizer_files: Path) -> None:
    shutil.copytree(tokenizer_files, tmp_path / "run" / "tokenizer")
    (tmp_path / "run" / "config.json").write_text(config.to_json(tiny.RUN))
    ids = Tokenizer.load(tokenizer_files).encode("the baker")
    record = {"id": "1", "rows": ["thebaker"], "row_ids": [ids], "steps": 3, "truncated": None, "text": "thebaker"}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    for flags, shown in (((), "piece 2"), (("--checkpoint", str(tmp_path / "run")), "baker")):
        assert main([str(tmp_path / "records.jsonl"), "--output", str(tmp_path / "one.svg"), *flags]) == 0
        assert shown in (tmp_path / "one.svg").read_text()
    assert "piece" not in (tmp_path / "one.svg").read_text()
    for change, message in (({"row_ids": 5}, "row_ids: found no list of lists"), ({"pieces": [1]}, "pieces: found .1")):
        (tmp_path / "records.jsonl").write_text(json.dumps(record | change) + "\n")
        with pytest.raises(UserError, match=message):
            main([str(tmp_path / "records.jsonl"), "--output", str(tmp_path / "two.svg"), *flags])
    assert not (tmp_path / "two.svg").exists()


def checkpoint_of(tmp_path: Path, **sections: Any) -> tuple[str, str]:
    """Flags for a checkpoint with this config, the only part that a picture reads without a tokenizer."""
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "config.json").write_text(config.to_json(tiny.change(tiny.RUN, **sections)))
    return "--checkpoint", str(tmp_path / "run")


@dataclasses.dataclass(frozen=True)
class Drawn(PipelinedMethod):
    """A custom method whose rows are on the grid."""

    grid: config.GridConfig = dataclasses.field(default_factory=config.GridConfig)
    name: ClassVar[str] = "drawn"


def test_record_names_its_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom method is drawn only with its checkpoint; a record without a method is drawn as pipelined."""
    plain = draw(tmp_path, ONE_ROW)
    assert plain == draw(tmp_path, ONE_ROW | {"method": "pipelined"})
    own = checkpoint_of(tmp_path, data={"separator": " ; "})
    assert draw(tmp_path, ONE_ROW | {"method": "pipelined"}, *own, "--delay", "1") == plain
    with pytest.raises(UserError, match="method: found 'sequential'; expected pipelined, whose"):
        draw(tmp_path, ONE_ROW | {"method": "sequential"}, *own)
    (tmp_path / "run" / "config.json").write_text(config.to_json(dataclasses.replace(tiny.RUN, method=Drawn())))
    assert draw(tmp_path, ONE_ROW | {"method": "drawn"}, *own, "--delay", "1") == plain
    with pytest.raises(UserError, match="method: found 'drawn'; expected pipelined, whose"):
        draw(tmp_path, ONE_ROW | {"method": "drawn"})
    monkeypatch.setattr(Drawn, "can", frozenset())
    with pytest.raises(UserError, match="found a record of"):
        draw(tmp_path, ONE_ROW | {"method": "pipelined"}, *own)


def starts(drawing: str) -> list[int]:
    """The time at which each row begins, including the empty row."""
    return [int(g.get("data-time", "")) for g in cells_of(drawing) if (g.findtext(f"{SVG}text")) == "bos"]


LINE: dict[str, Any] = {"id": "x", "text": None, "rows": None}


@pytest.mark.parametrize(
    "lengths, steps, flags, begun, said",
    [
        ([2, 3, 1], 10, (), [0, 3, 6, 9], "drawn at Δt = 3"),
        ([2, 3, 1], 13, (), [0, 4, 8, 12], "drawn at Δt = 4"),
        ([2, 2, 2], 5, (), [0, 1, 2, 3], "drawn at Δt = 1"),
        ([3, 2, 3], 4, (), [0, 0, 0], "drawn at Δt = 0"),  # named rows that start together
        ([8, 1, 2], 9, (), [0, 1, 2, 3], "Δt = 1; its steps also fit 0, 2; --delay or --checkpoint decides"),
        ([8, 1, 1], 10, (), [0, 3, 6, 9], "drawn at Δt = 3"),
        ([9, 1, 1], 10, (), [0, 1, 2, 3], "Δt = 1; its steps also fit 0, 2, 3; --delay or --checkpoint decides"),
        ([9, 1, 1], 10, (3,), [0, 3, 6, 9], "drawn at Δt = 3"),
        ([9, 1, 1], 10, ("--delay", "2"), [0, 2, 4, 6], "drawn at Δt = 2"),
        ([8, 1, 1], 10, (1,), [0, 3, 6, 9], "drawn at Δt = 3; its steps do not fit the checkpoint's 1"),
        ([4], 5, (), [0, 1], "Δt = 1; its steps also fit 0, 2, 3, ...; --delay or --checkpoint decides"),
        ([], 1, (), [0], "drawn at Δt = 1"),
    ],
)
def test_rows_start_at_multiples_of_the_delay_of_the_record(
    tmp_path: Path, capsys: Any, lengths: list[int], steps: int, flags: Any, begun: list[int], said: str
) -> None:
    record = LINE | {"row_ids": [[5] * n for n in lengths], "steps": steps, "truncated": None}
    given = checkpoint_of(tmp_path, grid={"delay": flags[0]}) if flags and isinstance(flags[0], int) else flags
    assert starts(draw(tmp_path, record, *given)) == begun
    line = capsys.readouterr().err
    assert line.startswith(f"{tmp_path}/x.svg: record x, ") and line.endswith(f"{said}\n") and line.count("\n") == 1


def test_delay_of_an_answer_is_among_the_possible_delays(tmp_path: Path) -> None:
    rng = random.Random(2)
    told = 0
    for _ in range(60):
        delay, answer = rng.randint(1, 4), [[2] * rng.randint(1, 6) for _ in range(rng.randint(0, 5))]
        limits: dict[str, Any] = {"time_max": rng.randint(4, 25), "sub_max": rng.randint(1, 6)}
        found = oracle.algorithm1(oracle.scripted_next_tokens(answer), delay=delay, stop="empty_row", **limits)
        record = LINE | {"row_ids": found.rows, "steps": found.steps, "truncated": found.truncated}
        drawn = draw(tmp_path, record, *checkpoint_of(tmp_path, grid={"delay": delay, **limits}))
        begun = [i * delay for i in range(len(found.all_rows))]
        assert starts(drawn) == begun
        told += starts(draw(tmp_path, record)) == begun
    assert told > 25  # also for records that are drawn without the checkpoint


@pytest.mark.parametrize(
    "truncated, flags, empty_row, said",
    [
        ("time_max", ("--sub-max", "2"), False, ""),
        ("time_max", ("--sub-max", "3"), True, ""),
        ("time_max", (2,), False, ""),
        ("time_max", (3,), True, ""),
        ("time_max", (3, "--sub-max", "2"), False, ""),
        (
            "time_max",
            (1,),
            True,
            "pass --sub-max or --checkpoint to decide whether the empty row was there",
        ),  # not the record's own checkpoint
        ("time_max", (), True, "pass --sub-max or --checkpoint to decide whether the empty row was there"),
        ("sub_max", (), False, ""),
        ("sub_max", (3,), False, ""),
        (None, (2,), True, ""),  # the delays of other settings: a complete answer has one delay
    ],
)
def test_no_empty_row_after_the_last_allowed_row(
    tmp_path: Path, capsys: Any, truncated: str | None, flags: Any, empty_row: bool, said: str
) -> None:
    record = LINE | {"row_ids": [[5] * 6, [5] * 2], "steps": 6 + (truncated != "time_max"), "truncated": truncated}
    if isinstance(next(iter(flags), None), int):
        flags = *checkpoint_of(tmp_path, grid={"delay": 1, "sub_max": flags[0]}), *flags[1:]
    drawn = draw(tmp_path, record, "--delay", "1", *flags)
    assert starts(drawn) == [0, 1, 2][: 2 + empty_row] and ("empty row" in texts_of(drawn)) == empty_row
    assert capsys.readouterr().err.removesuffix("\n").partition("; ")[2] == said


def test_literal_stop_is_noted(tmp_path: Path, capsys: Any) -> None:
    record = LINE | {"row_ids": [[5] * 2, [5]], "steps": 4, "truncated": None}  # before an empty row could begin
    flags = checkpoint_of(tmp_path, grid={"delay": 2, "stop": "literal"})
    assert starts(draw(tmp_path, record, *flags)) == [0, 2]
    assert "grid.stop = literal lets pass" in capsys.readouterr().err


def test_the_source_of_a_template(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "in.csv").write_text('id,title,text\nw,other,words\nx,"a b",\n')
    page = Page(draw(tmp_path, RECORD, "--input", str(tmp_path / "in.csv"), output="x.html"))
    assert page.source == "" and "has no source: --checkpoint fills in its template" in capsys.readouterr().err
    data = {"task": "csv", "rows": "delimiter", "source_template": "Title: {title} Text: {text}"}
    flags = checkpoint_of(tmp_path, data=data, grid={"delay": 1})
    page = Page(draw(tmp_path, RECORD, "--input", str(tmp_path / "in.csv"), *flags, output="x.html"))
    assert page.source == "Title: a b Text: " and page.marks == [("3", "a b")]
    assert capsys.readouterr().err == f"{tmp_path}/x.html: record x, drawn at Δt = 1\n"


def test_long_words_stay_on_the_page(tmp_path: Path) -> None:
    """This holds for every element that has a text of the user and no scroll bar."""
    page = draw(tmp_path, RECORD, output="x.html")
    assert {"h1", "li", ".source", ".facts"} <= {
        *re.findall(r"^ *([^{}\n]+) {[^}]*overflow-wrap: anywhere", page, re.M)
    }


def test_command_draws_pages(tmp_path: Path) -> None:
    source = tmp_path / "sources.jsonl"
    source.write_text(json.dumps({"id": "x", "source": "then a b and c"}) + "\n")
    page = Page(draw(tmp_path, RECORD, "--input", str(source), output="x.html"))
    assert page.source == "then a b and c"
    assert [text for _, text in page.marks] == ["a b", "c"]
    assert Page(draw(tmp_path, RECORD, output="x.html")).source == ""
    assert Page(draw(tmp_path, RECORD | {"source": "a b"}, output="x.html")).source == "a b"
    # The literal stop, before an empty row: two times bos and eos, three tokens.
    assert len(cells_of(draw(tmp_path, RECORD | {"steps": 4}, "--delay", "2"))) == 7


NAMED = RECORD | {"rows": ["price: 3", "colour: red"], "row_ids": [[5, 6], [7, 8]], "steps": 3, "text": "x"}
NAMED_GRID = {"grid": {"row_names": ("price:", "colour:"), "delay": 1, "sub_max": 2}}


@pytest.mark.parametrize(
    "sections, change, names",
    [
        (NAMED_GRID, {}, ["price", "colour"]),
        (NAMED_GRID, {"rows": ["colour: red", "price: 3"]}, ["colour", "price"]),  # by its text, not its place
        (NAMED_GRID, {"rows": ["price = 3", "red"]}, ["price", "row 2"]),
        (NAMED_GRID, {"rows": ["~ 3", "~ red"]}, ["price", "colour"]),  # a tokenizer that does not know the names
        (None, {"columns": {"colour": "red", "price": None}}, ["price", "colour"]),  # without the checkpoint
        (None, {"columns": [1]}, ["row 1", "row 2"]),
        (None, {}, ["row 1", "row 2"]),
    ],
)
def test_command_names_named_rows(tmp_path: Path, sections: Any, change: dict[str, Any], names: list[str]) -> None:
    flags = checkpoint_of(tmp_path, **sections) if sections else ()
    texts = texts_of(drawn := draw(tmp_path, NAMED | {"truncated": "sub_max"} | change, *flags, "--delay", "0"))
    assert [text for text in texts if text in {"price", "colour", "row 1", "row 2"}] == names
    assert all(f"<title>{name}, time-step 1: " in drawn for name in names)


def test_command_names_columns(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    settings = config.override(tiny.RUN, ["data.task=csv", "data.targets=unit price,colour"])
    (tmp_path / "run" / "config.json").write_text(config.to_json(settings))
    rows = {"rows": ["unit price: 3", "colour: red"], "truncated": "sub_max"}
    drawn = draw(tmp_path, NAMED | rows, "--checkpoint", str(tmp_path / "run"), "--delay", "0")
    assert "<title>unit price, time-step 1: " in drawn and "<title>colour, time-step 1: " in drawn


def test_names_of_rows_are_shortened_and_escaped() -> None:
    names = ["a name that is longer than the margin", "<b>&", None]
    grid = fill([["a"], ["b"], ["c"]], delay=1, names=names)
    drawn = svg(grid)
    widths = {text: text_width(text) * 11 for text in texts_of(drawn) if text.startswith(("a name", "<b>", "row "))}
    assert [*widths][1:] == ["<b>&", "row 3"] and all(width <= LEFT - 12 for width in widths.values())
    assert names[0] not in texts_of(drawn) and f"<title>{names[0]}, time-step 1: a</title>" in drawn
    trace = [[RowCall(0, 2, 0, ())], [RowCall(1, 2, 0, ())], [RowCall(2, 2, 0, ())], [RowCall(3, 1, 0, ())]]
    page = html(grid, trace=trace)
    assert '<th scope="row">&lt;b&gt;&amp;</th>' in page and "<b>&" not in page
    assert '<th scope="row">empty row</th>' in page and "empty row" in texts_of(drawn)


@pytest.mark.parametrize(
    "record, flags, message",
    [
        (RECORD, ("--delay", "2"), r"found 3; expected 5 for these rows at --delay 2 \(they fit --delay 0 or 1\)$"),
        (RECORD | {"steps": 8}, (), "steps: found 8; expected 3 for these rows at --delay 1$"),
        (RECORD | {"steps": 9}, ("--delay", "1"), r"expected 3 for these rows at --delay 1 \(they fit --delay 4\)$"),
        (RECORD | {"steps": 10**18}, (), "steps: found 1000000000000000000; expected 3"),
        (RECORD | {"steps": 1, "truncated": "time_max"}, (), "steps: found 1; expected 2 for these rows"),
        # No row is truncated.
        (RECORD | {"truncated": "time_max"}, ("--delay", "1"), "found 3; expected 2 for these rows"),
        (RECORD | {"truncated": "max_tokens"}, (), "truncated: found max_tokens"),
        (RECORD | {"steps": "3"}, (), "steps: found '3'; expected a whole number"),
        (RECORD | {"truncated": "max_length"}, (), "expected null, sub_max or time_max"),
        (RECORD | {"truncated": []}, (), "truncated: found \\[\\]"),
        (RECORD | {"row_ids": [[5, 6, 3, 7]]}, (), "one for each row of row_ids, as in a record of the pipelined"),
        (ONE_ROW | {"method": "sequential"}, (), r"^\S+:3: method: found 'sequential'; expected pipelined, whose rows"),
        (ONE_ROW | {"method": "branching"}, (), "method: found 'branching'; expected pipelined, whose rows"),
        (ONE_ROW | {"method": ""}, (), "method: found ''; expected pipelined"),
        (ONE_ROW | {"method": ["pipelined"]}, (), r"method: found \['pipelined'\]; expected pipelined"),
        (RECORD | {"row_ids": None}, (), "row_ids: found no list of lists; expected a record .* wrote as JSON lines"),
        (RECORD | {"row_tokens": [["a"], ["b"]]}, (), "row_tokens: found"),
        (RECORD, ("--id", "y"), "found no record with the id y"),
        (RECORD, ("--delay", "-1"), "--delay: found -1; expected at least 0"),
        (RECORD, ("--output", "x.png"), "expected a name that ends in .html or .svg"),
        (RECORD, ("--output", "/no/such/x.svg"), "/no/such/x.svg: cannot be written"),
        (RECORD, ("--colour", "red"), "--colour: no such option"),
        ("{", (), "records.jsonl:3: not JSON"),
        ("[]", (), "records.jsonl:3: found a list; expected an object"),
    ],
)
def test_command_refuses_invalid_records_and_flags(
    tmp_path: Path, record: Any, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        draw(tmp_path, record, *flags)
    assert "\n" not in str(caught.value)


def test_command_refuses_absent_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        main([str(tmp_path / "none.jsonl"), "--output", "x.svg"])


# Drafts, call by call. "A B C" and "D E" at Δt = 1: the draft "A" is correct and "x" wrong, row 1 ends in drafts
# while a query for row 3 is rejected, and then row 2 and the empty row end.
CALLS = [[[0, 2, 1, [5, 9]]], [[0, 2, 2, [7, 1]], [1, 1, 0, []], [2, 0, 0, [4]]], [[1, 2, 1, [9]], [2, 1, 1, [1]]]]
TRACED: dict[str, Any] = {"id": "x", "text": "A B C ; D E", "rows": ["A B C", "D E"], "row_ids": [[5, 6, 7], [8, 9]]}
TRACED |= {"steps": 4, "calls": 3, "truncated": None, "trace": CALLS}
TRACED |= {"pieces": {"1": "</s>", "4": "y", "5": "A", "6": "B", "7": "C", "8": "D", "9": "E"}}


def section_of(page: str) -> str:
    """The part of the page that shows calls."""
    assert page.count('id="calls"') == 1
    return page[page.index('<section class="view" id="calls">') : page.index("<script>")]


def drawing_of(page: str) -> ET.Element:
    """The picture in this section."""
    section = section_of(page)
    return ET.fromstring(section[section.index("<svg") : section.index("</svg>") + len("</svg>")])


def marked_cells(page: str) -> list[ET.Element]:
    return [g for g in drawing_of(page).iter(f"{SVG}g") if g.get("data-row")]


def marks_of(page: str) -> list[tuple[int, str, int, float, str]]:
    """Row, kind, call, place from left to right, and text of each written or drafted token."""
    found = []
    for g in marked_cells(page):
        kinds = {"own", "accepted", "rejected"} & set(str(g.get("class")).split())
        text, place = g.find(f"{SVG}text"), number(g.find(f"{SVG}rect"), "x")
        assert text is not None
        found.append((int(g.get("data-row", "")), kinds.pop(), int(g.get("data-call", "")), place, text.text or ""))
    return found


def test_page_shows_results_of_drafts(tmp_path: Path) -> None:
    page = draw(tmp_path, TRACED, output="x.html")
    found = marks_of(page)
    assert [(row, kind, call, text) for row, kind, call, _, text in found] == [
        (0, "accepted", 1, "✓ A"),
        (0, "own", 1, "B"),
        (0, "rejected", 1, "✗ E"),
        (0, "accepted", 2, "✓ C"),
        (0, "accepted", 2, "✓ eos"),
        (1, "own", 2, "D"),
        (2, "rejected", 2, "✗ y"),
        (1, "accepted", 3, "✓ E"),
        (1, "own", 3, "eos"),
        (2, "accepted", 3, "✓ eos"),
    ]
    # A column is a time-step: A is at 1; B, the E in its place and D at 2; C, E, the y and the empty row's eos at 3.
    across = sorted({place for *_, place, _ in found})
    assert [across.index(place) + 1 for *_, place, _ in found] == [1, 2, 2, 3, 4, 2, 3, 3, 4, 3]
    section = section_of(page)
    assert "3 decoder calls for 4 time-steps; 5 of 7 drafted tokens accepted (71 %)" in section
    rows = re.findall(r"<tr>(.*?)</tr>", section)[1:]
    assert [re.findall(r">([^<]*)</t[dh]>", row) for row in rows] == [
        ["1", "row 1", "A", "E", "B"],
        ["2", "row 1", "C eos", "", ""],
        ["2", "row 2", "", "", "D"],
        ["2", "empty row", "", "y", "the row could not begin yet"],
        ["3", "row 2", "E", "", "eos"],
        ["3", "empty row", "eos", "", ""],
    ]
    assert 'max="3" value="3" step="1" aria-label="Decoder call"' in section
    untraced = {key: value for key, value in TRACED.items() if key not in ("trace", "pieces")}
    assert 'id="calls"' not in draw(tmp_path, untraced, output="x.html")
    assert cells_of(draw(tmp_path, TRACED)) and "data-call" not in draw(tmp_path, TRACED)


def test_page_distinguishes_wrong_drafts_from_early_drafts(tmp_path: Path) -> None:
    """A rejected draft is visible until another draft takes its place."""
    calls = [
        [[0, 1, 0, []]],
        [[0, 1, 0, [9]], [1, 1, 0, [8, 4]]],  # row 2's D is correct, but row 1's E is not
        [[0, 1, 0, []], [1, 1, 0, [9]], [2, 1, 0, []]],
        [[0, 1, 0, []], [1, 1, 0, []]],
    ]
    page = draw(tmp_path, TRACED | {"trace": calls, "calls": 4}, output="x.html")
    tips = re.findall(r"<title>(call .*?)</title>", page)
    early = "(rejected draft, right, but a row above was not so far)"
    assert [tip for tip in tips if "rejected" in tip] == [
        "call 2, row 1, time-step 2: E (rejected draft)",
        f"call 2, row 2, time-step 2: D {early}",
        "call 2, row 2, time-step 3: y (rejected draft)",
        f"call 3, row 2, time-step 3: E {early}",
    ]
    ends = {str(g.find(f"{SVG}title").text): g.get("data-until") for g in marked_cells(page)}  # type: ignore[union-attr]
    assert {tip[:35] for tip, until in ends.items() if until == "3"} == {"call 2, row 2, time-step 3: y (reje"}


def test_every_place_is_written_once_with_any_drafts(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(40):
        delay, count = rng.randint(1, 3), rng.randint(0, 6)
        answer = [[rng.randint(2, 8) for _ in range(rng.randint(1, 7))] for _ in range(count)]
        time_max = rng.randint(4, 25)
        limits: dict[str, Any] = {"delay": delay, "time_max": time_max, "sub_max": 5}
        expected = oracle.algorithm1(oracle.scripted_next_tokens(answer), stop="empty_row", **limits)
        table = [[*row, 1] for row in [*answer, *[[]] * 6]]

        def drafts(i: int, length: int, table: list[list[int]] = table) -> list[int]:
            return [token if rng.random() < 0.7 else rng.randint(1, 8) for token in table[i][length : length + 4]]

        trace = wavefront.trace(expected.all_rows, drafts, **limits)
        record = LINE | {"row_ids": expected.rows, "steps": expected.steps, "truncated": expected.truncated}
        record |= {"calls": len(trace), "trace": trace}
        page = draw(tmp_path, record, "--delay", str(delay), output="x.html")
        found = marks_of(page)
        empty_row = any(row[1:] == [1] for row in expected.all_rows)
        more: dict[str, Any] = {"truncated": expected.truncated, "steps": expected.steps}
        grid = fill([list(map(str, row)) for row in expected.rows], empty_row=empty_row, delay=delay, **more)
        wide = number(drawing_of(page).find(f".//{SVG}rect"), "width") + 4
        right = [(row, place, text) for row, kind, _, place, text in found if kind != "rejected"]
        written = {(row, round((place - LEFT - 2) / wide)): text for row, place, text in right}
        cells = {(cell.row, cell.time): cell.text for cell in grid.cells if cell.kind != "bos"}
        assert {place: text.removeprefix("✓ ") for place, text in written.items()} == cells
        assert ("empty row" in re.findall(r">([^<]*)</text>", section_of(page))) == empty_row
        drafted = [one for call in trace for one in call]
        assert sum(kind == "accepted" for _, kind, *_ in found) == sum(one[2] for one in drafted)
        assert sum(kind == "rejected" for _, kind, *_ in found) == sum(len(one[3]) - one[2] for one in drafted)


def test_page_survives_any_piece(tmp_path: Path) -> None:
    for text in HOSTILE:
        page = draw(tmp_path, TRACED | {"pieces": {"4": text, "5": text}}, output="x.html")
        assert marks_of(page)
        assert Page(page).loads == [] and page.count("</script>") == 1


def traced(call: int, entry: Any) -> dict[str, Any]:
    """The record with another first entry of a call."""
    return TRACED | {"trace": [[entry, *one[1:]] if i == call else one for i, one in enumerate(CALLS)]}


@pytest.mark.parametrize(
    "record, message",
    [
        (TRACED | {"trace": 3}, "trace: found 3; expected a list of calls"),
        (TRACED | {"trace": CALLS[:2]}, "trace: found 2 calls; expected 3, as in calls"),
        (TRACED | {"calls": None}, "trace: found 3 calls; expected None, as in calls"),
        (TRACED | {"pieces": {"5": 7}}, "pieces: found {'5': 7}; expected an object with a text for each id"),
        (TRACED | {"pieces": []}, r"pieces: found \[\]; expected an object"),
        (traced(0, [0, 2]), r"call 1: found \[0, 2\]; expected \[row, written, accepted, \[drafted ids\]\]"),
        (traced(0, [0, 2, 1, ["\n" * 5000]]), "expected \\[row, written, accepted"),
        (traced(0, [0, True, 0, []]), "expected \\[row, written, accepted"),
        (traced(0, [0, -1, 0, []]), "expected \\[row, written, accepted"),
        (traced(0, [10**9, 2, 1, [5, 9]]), "expected a row number from 0 to 0"),
        (traced(1, [1, 1, 0, []]), "expected a row number from 2 to 2"),
        (traced(1, [2, 0, 0, [4]]), "expected a row number from 0 to 1"),
        (traced(0, [0, 2, 3, [5, 6]]), "of the 4 remaining tokens of row_ids"),
        (traced(0, [0, 3, 1, [5, 9]]), "of the 4 remaining tokens of row_ids"),
        (traced(0, [0, 1, 1, [5, 9]]), "of the 4 remaining tokens of row_ids"),  # no token of the model
        (traced(1, [0, 3, 2, [7, 1]]), "of the 2 remaining tokens of row_ids"),
        (traced(0, [0, 2, 1, [9, 9]]), "expected accepted drafts that are in row_ids"),
        (traced(2, [1, 1, 0, [9]]), "trace: found 2 tokens of row 1; expected 3, as in row_ids"),
    ],
)
def test_command_refuses_forged_traces(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        draw(tmp_path, record, output="x.html")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not (tmp_path / "x.html").exists()
