"""Custom files: templates for the source, rules for the rows, and the text that tasks make of them."""

import bz2
import csv
import datetime
import decimal
import gzip
import io
import itertools
import json
import lzma
import unicodedata
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from nltk.stem.porter import PorterStemmer

from pipejax.apps.papers.texts import plain_text, read_array
from pipejax.config import Config, DataConfig, check, override
from pipejax.data import lines, make_task
from pipejax.data.encoding import answered
from pipejax.data.examples import Example
from pipejax.data.lines import id_of, kind
from pipejax.data.own_files import FilesTask
from pipejax.data.text import Template, keyphrases, normalized
from pipejax.system.errors import UserError


def read(tmp_path, content, name="train.jsonl", **settings):
    """The examples of a file."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    task = "csv" if name.endswith(".csv") else "jsonl"
    return make_task(DataConfig(task=task, train=str(path), **settings)).examples("train")


def refusal(tmp_path, content, name="train.jsonl", **settings):
    with pytest.raises(UserError) as caught:
        read(tmp_path, content, name, **settings)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


LINE = json.dumps({"title": "Ice", "text": "It {thaws}.", "answer": "a ;b;; c"})
FILLED = {"source_template": "T: {title} C: {text}", "targets": "answer", "rows": "delimiter"}
PARTED = {"rows": "delimiter"}


@pytest.mark.parametrize(
    "content, name, settings, expected",
    [
        ('{"id": 7, "source": "x", "targets": ["a", "b"]}', "a.jsonl", {}, ("7", "x", ("a", "b"))),
        (LINE, "a.jsonl", {**FILLED, "delimiter": ";"}, ("1", "T: Ice C: It {thaws}.", ("a", "b", "c"))),
        (
            'title,id,answer\n"Ice, ""old""",x,"It rained, e.g. on Mr. Ash.\nThen it stopped. Good!"\n',
            "a.csv",
            {"source_template": "{title}", "targets": "answer", "rows": "sentences"},
            ("x", 'Ice, "old"', ("It rained, e.g. on Mr. Ash.", "Then it stopped.", "Good!")),
        ),
        ("\ufeffsource,targets\r\na,\r\n\r\n", "a.csv", {"rows": "delimiter"}, ("2", "a", ())),
        ('source,targets\na,"b\nc d\n\n"\n', "a.csv", {"rows": "delimiter"}, ("2", "a", ("b", "c d"))),
        (f"source,targets\na,b{' b' * 200_000}", "a.csv", {"rows": "delimiter"}, ("2", "a", ("b" + " b" * 200_000,))),
    ],
)
def test_line_is_read_as_an_example(content, name, settings, expected, tmp_path):
    assert list(read(tmp_path, content, name, **settings)) == [Example(*expected)]


@pytest.mark.parametrize(
    "content, name, settings, words",
    [
        (LINE, "a.jsonl", {"source_template": "{titel}"}, ['a.jsonl:1: found no "titel"', "title, text, answer"]),
        ("source,targets\na,b\n", "a.csv", PARTED | {"targets": "rows"}, ['a.csv: found no "rows"', "source, targets"]),
        (LINE, "a.jsonl", FILLED | {"rows": "list"}, ['"answer": found text', "texts (data.rows=delimiter splits"]),
        ('{"source": "x", "targets": ["a"]}', "a.jsonl", {"rows": "sentences"}, ['"targets": found a list']),
        ("source,targets\na,b\n", "a.csv", {}, ["data.rows: found 'list'"]),
        ("source,targets\na\n", "a.csv", {"rows": "delimiter"}, ["a.csv:2: found 1 column; expected 2"]),
        ("source,source\na,b\n", "a.csv", {"rows": "delimiter"}, ["a.csv:1: found the column names source, source"]),
        ("source,targets\n", "a.csv", {"rows": "delimiter"}, ["found no lines"]),
        ("", "a.csv", {"rows": "delimiter"}, ["found no lines"]),
        ("source,targets\n,b\n", "a.csv", {"rows": "delimiter"}, ['a.csv:2: "source": found an empty text']),
        (b"source,targets\n\xff,b\n", "a.csv", PARTED, ["a.csv:2: found byte 0xff at column 1; expected UTF-8"]),
        ('source,targets\n"a,b\n', "a.csv", {"rows": "delimiter"}, ["a.csv:", "not CSV"]),
        ("id,source,targets\n1,a,b\n1,a,b\n", "a.csv", {"rows": "delimiter"}, ["a.csv:3", "'1' again", "line 2"]),
        (LINE, "a.jsonl", {"source_template": "{title"}, ["data.source_template: found '{title'"]),
        (LINE, "a.jsonl", {"source_template": "title"}, ["data.source_template: found 'title'", "{title}"]),
        (LINE, "a.jsonl", {"source_template": "{}"}, ["data.source_template"]),
        (LINE, "a.jsonl", {"source_template": "{title!r}"}, ["data.source_template"]),
        (LINE, "a.jsonl", {"source_template": "{title.x}"}, ["data.source_template"]),
    ],
)
def test_invalid_line_is_refused(content, name, settings, words, tmp_path):
    message = refusal(tmp_path, content, name, **settings)
    assert all(word in message for word in words), message


# Files with usual irregularities.

CELLS = {"rows": "delimiter", "delimiter": "|", "source_template": "{title}: {text}", "targets": "tags"}
TWO = [Example("2", "Ice: It; \nthaws", ("a", "b")), Example("4", "Fire: burns", ())]  # by their first lines


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize(
    "name, content, told",
    [
        ("a.csv", 'title,text,tags\nIce,"It; \nthaws",a|b\nFire,burns,\n', ""),
        ("a.csv", 'title;text;tags\r\nIce;"It; \nthaws";a|b\r\nFire;burns;\r\n', "';'"),
        ("a.csv", '\ufefftitle\ttext\ttags\nIce\t"It; \nthaws"\ta|b\nFire\tburns\t', "'\\t'"),
        ("a.TSV", 'title\ttext\ttags\nIce\t"It; \nthaws"\ta|b\nFire\tburns\t\n', ""),
        ("a.txt", ' title , text,"tags"\nIce,"It; \nthaws",a|b\nFire,burns," "\n', ""),
        ("a.csv", 'id,title,text,tags\n,Ice,"It; \nthaws",a|b\n ,Fire,burns,\n', ""),
    ],
)
def test_tables_are_read(pack, name, content, told, tmp_path, said):
    """Names or the task tell the format, packed or not; the delimiter is detected."""
    path = tmp_path / name
    path.write_bytes(pack(content.encode()))
    settings = {"task": "csv" if name.endswith("txt") else "jsonl", "csv_quotes": "quote" if "TSV" in name else "auto"}
    assert make_task(DataConfig(train=str(path), **settings, **CELLS)).examples("train") == TWO
    assert [line for line in said if "separated by" in line] == (
        [f"{path}: columns are separated by {told}, as detected from the line of column names"] if told else []
    )


def test_carriage_returns_and_other_delimiters_are_read(tmp_path):
    content = b"title^text^tags\rIce^a,b\rc^\rFire^burns^x\r"
    with pytest.raises(UserError, match=r"a\.csv:3: found 2 columns; expected 3"):
        read(tmp_path, content.replace(b"\rc", b"^\rc"), "a.csv", **CELLS, csv_delimiter="^")
    found = read(tmp_path, content.replace(b"\rc", b"c"), "a.csv", **CELLS, csv_delimiter="^")
    expected = [("Ice: a,bc", (), ":2"), ("Fire: burns", ("x",), ":3")]
    assert [(e.source, e.targets, e.place[-2:]) for e in found] == expected
    for bad in ("ab", '"', "\n"):
        with pytest.raises(UserError, match=r"data\.csv_delimiter: found"):
            check(Config(data=DataConfig(csv_delimiter=bad)), where="here")
    assert override(Config(), ["data.csv_delimiter=\t"]).data.csv_delimiter == "\t"
    with pytest.raises(UserError, match="found two characters; expected one"):
        override(Config(), [r"data.csv_delimiter=\t"])


GOOD = '{"source": "x", "targets": []}\n'


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.csv", 'source,targets\nx,y\n"a\nb",é\n'.encode("cp1252"), ["a.csv:4: found byte 0xe9", "be CP1252"]),
        ("a.csv", "source,targets\nx,y\n".encode("utf-16"), ["a.csv:1: found byte 0xff", "`iconv -f UTF-16 -t UTF-8`"]),
        ("a.csv", "source,targets\nx,y\n".encode("utf-16-be"), ["a.csv:1: found byte 0x00", "seems to be UTF-16BE"]),
        ("a.jsonl", GOOD.encode("utf-16-le"), ["a.jsonl:1: found byte 0x00", "seems to be UTF-16LE"]),
        ("a.jsonl", GOOD.encode() + GOOD.replace("x", "“x”").encode("cp1252"), ["a.jsonl:2: ", "0x93", "CP1252"]),
        ("a.jsonl", GOOD.encode() + b"\x81\x8d", ["a.jsonl:2: found byte 0x81 at column 1; expected UTF-8$"]),
        (
            "a.jsonl",
            GOOD.encode() + bytes(range(8)) + b"\xff",
            ["a.jsonl:2: found byte 0xff at column 9; expected UTF-8$"],
        ),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04", ["found data packed with zstd; expected text", "zstd -d"]),
        ("a.csv", b"PK\x03\x04\x14", ["a.csv: found a zip archive or a workbook", "CSV in UTF-8"]),
        ("a.csv", b"\xd0\xcf\x11\xe0", ["a.csv: found a workbook"]),
        ("a.jsonl", b"PAR1\x15", ["a.jsonl: found Parquet", "end in .parquet"]),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", ["a.jsonl: found a pointer of Git LFS"]),
        ("a.jsonl", bz2.compress(GOOD.encode() * 99)[:-9], ["a.jsonl: damaged bzip2 data"]),
        ("a.jsonl", bz2.compress(GOOD.encode())[:9] + b"x" * 50, ["a.jsonl: damaged bzip2 data"]),
        ("a.jsonl", lzma.compress(GOOD.encode() * 99)[:-9], ["a.jsonl: damaged xz data"]),
    ],
)
def test_files_that_are_no_text_in_utf_8(name, content, words, tmp_path):
    message = refusal(tmp_path, content, name, rows="delimiter" if name == "a.csv" else "list")
    assert all(message.endswith(word[:-1]) if word[-1] == "$" else word in message for word in words), message


# Dirty cells.


def test_some_records_may_have_empty_fields(tmp_path):
    """Fields are null, no number, blank or absent; but some record has each field, and each record has some text."""
    values = [{"title": None, "text": "a"}, {"text": "b"}, {"title": " \t", "text": "c"}, {"title": "T", "text": ""}]
    settings = {"source_template": "{title}: {text}", "targets": "tags"}
    good = [{**value, "tags": []} for value in values]
    lines = "".join(map(json.dumps, good)).replace("}{", "}\n{")
    assert [e.source for e in read(tmp_path, lines, **settings)] == [": a", ": b", ": c", "T: "]
    rows = [{"title": None, "text": "a", "tags": None}, {"title": "T", "text": "b", "tags": "x"}]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    task = make_task(DataConfig(train=str(tmp_path / "a.parquet"), rows="delimiter", **settings))
    assert [(e.source, e.targets) for e in task.examples("train")] == [(": a", ()), ("T: b", ("x",))]
    for extra, words in (
        ({"title": "", "text": " ", "tags": []}, 'train.jsonl:5: "title", "text": found an empty text'),
        ({"titel": "x", "text": "b", "tags": []}, 'expected one, or null (did you mean "titel"?)'),
        ({"TITLE": "x", "text": "b", "tags": []}, '(did you mean "TITLE"?)'),
        ({"other": "x", "tags": []}, 'train.jsonl:5: found no "title"; expected one (keys: other, tags)'),
        ({"title": ["x"], "text": "b", "tags": []}, 'train.jsonl:5: "title": found a list; expected text'),
    ):
        assert words in refusal(tmp_path, f"{lines}\n{json.dumps(extra)}", **settings)
    never = "".join(json.dumps({"text": "a", "tags": [], "headline": "b"}) + "\n" for _ in range(2))
    message = refusal(tmp_path, never, **settings)
    assert message.endswith(
        'found no "title" in any record; expected the field in some records (keys: text, tags, headline)'
    )
    numbered = '{"text1": "a", "text3": "x", "tags": []}\n{"text2": "b", "tags": []}'
    found = read(tmp_path, numbered, **settings | {"source_template": "{text1}{text2}"})
    assert [e.source for e in found] == ["a", "b"]  # numbers are no misspelt names


BAD = [
    (b'{"source": "b"', "not JSON"),
    (b"[]", "found a list"),
    (b"[", "found the beginning of a list; expected one object a line"),
    (b'{"source": "caf\xe9", "targets": []}', "expected UTF-8"),
    (b'{"source": " ", "targets": []}', "found an empty text"),
    (b'{"source": "c", "targets": "x"}', "expected a list"),
    (b'{"id": "first", "source": "c", "targets": []}', "'first' again"),
    (b'{"id": 1.5, "source": "c", "targets": []}', "found the number 1.5"),
]


def test_bad_lines_are_skipped_and_reported(tmp_path, said):
    """The first ten are reported with their places, then the count; good lines keep their numbers.

    By default the first is an error.
    """
    good = b'{"id": "first", "source": "a", "targets": []}'
    bad = [line for line, _ in BAD] + [b"{"] * 4
    content = b"\n".join([good, *bad, b"", b'{"source": "z", "targets": ["y"]}'])
    assert "train.jsonl:2: not JSON" in refusal(tmp_path, content)
    found = read(tmp_path, content, skip_bad=True)
    assert [(e.id, e.source) for e in found] == [("first", "a"), ("15", "z")]
    lines = [line for line in said if "skipped" in line]
    assert len(lines) == 10 + 1
    for number, (line, (_, words)) in enumerate(zip(lines, BAD, strict=False), start=2):
        assert f"train.jsonl:{number}: " in line and words in line and line.endswith("; skipped")
    assert lines[-1].endswith("train.jsonl: 12 bad lines skipped, 2 good ones kept")
    message = refusal(tmp_path, b"\n".join(bad[:3]), skip_bad=True)
    assert "train.jsonl: found 3 bad lines" in message and "train.jsonl:1: not JSON" in message


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_line_without_an_end_raises_one_line(tmp_path, monkeypatch, pack):
    """A line as long as the bound is read; of a longer line, no part becomes a record."""
    monkeypatch.setattr(lines, "LONGEST", 1 << 20)
    file, record = tmp_path / "x.jsonl", b'{"source": "a", "targets": []}'
    for spaces, refused in ((1 << 20, False), ((1 << 20) + 1, True)):
        file.write_bytes(pack(b"\n".join([record, record.ljust(spaces - 1), record])))
        if refused:
            with pytest.raises(UserError, match=r"x\.jsonl:2: found a line of more than 1 MiB; expected records$"):
                list(lines.read_file(file))
        else:
            assert len(list(lines.read_file(file))) == 3


def test_places_of_lines_and_of_records_in_an_array():
    found = list(lines.decode_lines([b"\xef\xbb\xbfa\r\n", b"\n", b" b \n", b"c\r"], "x"))
    assert found == [("x:1", "a"), ("x:2", ""), ("x:3", " b "), ("x:4", "c")]
    array = b'{"version": 1, "data": [\r\n{"a": 1}, {"a":\n2},\n\n{"a": 3}\n,{"a": 4}]}\n'
    assert list(read_array(array, "x")) == [
        ("x:2: record 1", {"a": 1}),
        ("x:2: record 2", {"a": 2}),
        ("x:5: record 3", {"a": 3}),
        ("x:6: record 4", {"a": 4}),
    ]


def test_messages_of_bad_lines_are_limited_and_all_are_counted():
    bad = lines.BadLines("x", skip=True, most=2, tell=False)
    for text in "abca":
        bad(UserError(text))
    assert bad.messages == ["a", "b"] and bad.count == 4


@pytest.mark.parametrize("between, said_so", [("|", False), (";", True)])
def test_delimiter_without_effect_is_reported(between, said_so, tmp_path, caplog):
    caplog.set_level("INFO")
    content = "source,targets\n" + "".join(f"s{i},a{i}|b\n" for i in range(20))
    read(tmp_path, content, "a.csv", rows="delimiter", delimiter=between)
    line = f"a.csv: data.delimiter {between!r} splits none of 20 targets: each is one row"
    assert (line in caplog.text) == said_so


def test_ragged_rows_are_skipped_and_open_quotes_are_not(tmp_path, said):
    content = 'source,targets\na,x\nb\nc,y,z\n"d"d,y\n"e\ne",y,z\nf,y\n,y\ng,x\n'
    settings = {"rows": "delimiter", "skip_bad": True}
    found = [(e.id, e.source) for e in read(tmp_path, content, "a.csv", **settings)]
    assert found == [("2", "a"), ("8", "f"), ("10", "g")]
    for words in ("3: found 1 column", "4: found 3", "5: not CSV", "6: found 3 columns in lines 6 to 7", "9: "):
        assert sum(f"a.csv:{words}" in line for line in said) == 1
    # A byte that is no UTF-8 in this quote is not the reported error: no row is found after it.
    for rest in (b"c,z\n", b"c\xe9,z\nd,z\n"):
        message = refusal(tmp_path, b'source,targets\na,x\n"b,y\n' + rest, "a.csv", **settings)
        assert "a.csv:3: not CSV (a quote is never closed)" in message
    message = refusal(tmp_path, b'source,targets\na,x\n"b\n\xe9",y\nc,z\n', "a.csv", rows="delimiter")
    assert "a.csv:4: found byte 0xe9" in message and message.endswith("in lines 3 to 4")


# Quotes that are text, and quotes that enclose cells.

TARGETS = {"rows": "delimiter", "delimiter": "/"}


def table(between, count=2000, **stray):
    """Lines of names and rows, numbered as in the file, some of which are replaced."""
    lines = [between.join(["id", "source", "targets"])]
    lines += [between.join([f"r{i}", f"text {i}", f"a{i}/b"]) for i in range(2, count + 2)]
    for number, cells in stray.items():
        lines[int(number[1:]) - 1] = between.join(cells)
    return lines


STRAY = {"n14": ["r14", '"Yes," she said', "x"], "n1990": ["r1990", 'he said "no"', 'x"']}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("stray", [STRAY, {"n7": ["r7", '"never closed', "x"]}, {"n9": ["r9", '12"', '"/"']}])
@pytest.mark.parametrize("name, quotes", [("a.tsv", "auto"), ("A.TSV", "letters"), ("a.csv", "letters")])
def test_quotes_are_text_in_a_tsv(name, quotes, stray, pack, tmp_path, said):
    """Each line is a row, and its cells are the parts between tabs; in CSV only if a setting says so."""
    lines = [x for x in table("\t", **stray) if quotes == "auto" or "," not in x]
    path = tmp_path / (name + (".gz" if pack is gzip.compress else ""))
    path.write_bytes(pack("\r\n".join(lines).encode()))
    found = make_task(DataConfig(train=str(path), csv_quotes=quotes, **TARGETS)).examples("train")
    assert [(e.id, e.source, e.targets) for e in found] == [
        (name, source, tuple(filter(None, rows.split("/"))))
        for name, source, rows in (x.split("\t") for x in lines[1:])
    ]
    told = [f"{path}:9: found a cell in quotes, which are read as text, unless data.csv_quotes = quote"]
    assert [x for x in said if "in quotes" in x] == (told if "n9" in stray and quotes == "auto" else [])


@pytest.mark.parametrize("between", [",", ";", "\t", "|"])
@pytest.mark.parametrize(
    "first, last",
    [
        (["r14", '"Yes', "x"], ["r1990", 'no"', "x"]),
        (['"r14', "x", "y"], ["r1990", "x", 'no"']),  # fewer columns than are expected
        (["r14", "x", '"y'], ["r1990", "x", 'y"']),
        (["r14", '"Yes', "x"], ["r1990", 'he said "no" to', "x"]),  # a line that is no CSV
        (["r14", '"Yes', "x"], ["r1990", 'é"', "x"]),  # and a line that is no UTF-8
    ],
)
def test_rows_that_are_lost_in_a_quote_are_refused(first, last, between, tmp_path):
    """Two stray quotes make a cell of the rows between them, `skip_bad` or not; two settings accept it."""
    lines = table(between, n14=first, n1990=last)
    content = "\n".join(lines).encode("latin-1")
    for skip in (False, True):
        message = refusal(tmp_path, content, "a.csv", skip_bad=skip, **TARGETS)
        assert "a.csv:14: found a quoted cell that seems to contain rows in lines 14 to 1990" in message
        assert "data.csv_quotes=letters" in message
    if "é" in last[1]:
        return
    found = read(tmp_path, content, "a.csv", csv_quotes="letters", **TARGETS)
    assert [e.source for e in found] == [x.split(between)[1] for x in lines[1:]]
    if first[1] == '"Yes' and last[1] == 'no"':
        assert len(read(tmp_path, content, "a.csv", csv_quotes="quote", **TARGETS)) == 2000 - 1976


def test_two_lines_are_rows_too_and_a_tenth_may_be_others(tmp_path):
    lines = table(",", 40, n3=["r3", '"a', "x"], n4=["r4", 'b"', "y"])
    assert "in lines 3 to 4" in refusal(tmp_path, "\n".join(lines), "a.csv", **TARGETS)
    lines = table(",", 40, n3=["r3", '"a', "x"], n12=["r12", "a", "b", "c"], n30=["r30", 'b"', "y"])
    assert "in lines 3 to 30" in refusal(tmp_path, "\n".join(lines), "a.csv", **TARGETS)
    spaced = [line.replace(",", ", ") for line in table(",", 40, n3=["r3", "x", "y"])]
    spaced[2], spaced[9] = 'r3,"a, x', 'r10, b",y'
    assert "in lines 3 to 10" in refusal(tmp_path, "\n".join(spaced), "a.csv", **TARGETS)


def test_multi_line_cells_with_delimiters_are_reported(tmp_path, said):
    """In prose they are correct: the first is reported with its lines, then their number and the longest."""
    prose = '"It rained, it snowed,\nand then, at last, it stopped."'
    lines = ["id,source,targets", f"a,{prose},x", 'b,"no\ncomma",x', "c,one line,x"]
    lines += [f'd,"{prose[1:-1]}\nNo,\nit did not",x']
    assert len(read(tmp_path, "\n".join(lines), "a.csv", **TARGETS)) == 4
    assert [line.rpartition("/")[2] for line in said] == [
        "a.csv:2: found a cell that contains line ends and ',' in lines 2 to 3",
        "a.csv: 2 rows have a cell that contains line ends, the longest in lines 7 to 10",
    ]
    said.clear()
    read(tmp_path, 'id,source,targets\na,"no\ncomma","x\ny"\n', "b.csv", **TARGETS)
    assert not said
    longer = 'id,source,targets\n1.0,"no\ncomma\nat\nall",x\n2.0,"a, b\nc, d",x\n3.0,"a, b\nc, d",x\n'
    read(tmp_path, longer, "c.csv", **TARGETS)  # the first row is reported for its id
    assert said[-1].endswith("c.csv: 2 rows have a cell that contains line ends, the longest in lines 8 to 9")
    said.clear()
    # One comma in each line, as in a row of two columns, but with a space after it.
    prose = 'source,targets\n"Yes, it\ndid, no",x\nb,"Yes\nNo, no"\n'
    assert [e.source for e in read(tmp_path, prose, "e.csv", **TARGETS)] == ["Yes, it\ndid, no", "b"]
    settings = {"rows": "delimiter", "targets": "source"}
    assert len(read(tmp_path, 'source\na\n"b\nc"\nd\n', "one.csv", **settings)) == 3
    assert said[-1].endswith("one.csv:3: found a cell that contains line ends in lines 3 to 4")


MANY_LINES = {
    "an address": "12 Main St,Springfield\n45 Oak Ave,Shelbyville",
    "code": "def f(a,b):\n    g(a,b)\n    return h(a,b)",
    "SQL": "SELECT a,b\nFROM t,u\nWHERE a=1,b=2",
    "a verse": "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you,",
    "a dialogue": "Ann:hi,Bob\nBob:hi,Ann\nok",
    "a table": "Items\n" + "\n".join(f"k{i},v{i}" for i in range(60)),
    "quotes": 'say "a,b"\nthen "c,d"',
    "ends of old lines": "a,b\r\nc,d\r\ne",
}


@pytest.mark.parametrize("between", [",", ";", "\t", "|"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", MANY_LINES)
def test_two_column_cell_with_lines_like_rows_is_read(name, first, between, tmp_path, said):
    """The csv library writes it so: in the first or the last column, once or often, with bad lines skipped or not."""
    cell = MANY_LINES[name].replace(",", between)
    for cells in ([cell], [cell, "plain", cell, cell]):
        file = io.StringIO(newline="")
        table = csv.writer(file, delimiter=between)
        table.writerow(["source", "targets"] if first else ["targets", "source"])
        for number, text in enumerate(cells):
            table.writerow([text, f"x{number}"] if first else [f"x{number}", text])
        for skip in (False, True):
            found = read(tmp_path, file.getvalue(), "a.csv", skip_bad=skip, csv_delimiter=between, **TARGETS)
            assert [(e.source, e.targets) for e in found] == [(text, (f"x{i}",)) for i, text in enumerate(cells)]
    assert any("a.csv:2: found a cell that contains line ends" in line for line in said)


@pytest.mark.parametrize("name", ["code", "a table", "quotes"])
def test_cell_of_several_lines_is_read_if_other_cells_are_quoted_correctly(name, tmp_path):
    cell = MANY_LINES[name].replace(",", ",,").replace("\n", ",,\n")
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["id", "source", "targets"], ["1", "a, b", "x"], ["2", cell, "y"]])
    assert [e.source for e in read(tmp_path, file.getvalue(), "a.csv", **TARGETS)] == ["a, b", cell]
    table = 'id,source,targets\n1,{},x\n2,"q\nr,s,t\nu,v",w\n'
    assert len(read(tmp_path, table.format('"a, b"'), "b.csv", **TARGETS)) == 2
    table = 'id,source,targets\n1,{},x\n2,p,"q\nr,s,t\nu,v,w"\n'
    assert len(read(tmp_path, table.format('"a ""b"""'), "c.csv", **TARGETS)) == 2
    assert "in lines 3 to 5" in refusal(tmp_path, table.format("a"), "d.csv", **TARGETS)


@pytest.mark.parametrize("other", ['a 12" b', 'say "no" to it', '"a" b'])
@pytest.mark.parametrize("before", [True, False])
def test_two_column_lines_are_rows_despite_malformed_quotes(other, before, tmp_path, said):
    """They may be anywhere in the file, with bad lines skipped or not; text with such quotes alone is accepted."""
    rows = ['s1,"x', "s2,x", 's3,x"']
    stray = f"{other},y"
    content = "\n".join(["source,targets", *([stray] if before else []), *rows, "t,z", *([] if before else [stray])])
    first = 3 if before else 2
    for skip in (False, True):
        if other.startswith('"') and before and not skip:
            assert "a.csv:2: not CSV" in refusal(tmp_path, content, "a.csv", **TARGETS)
            continue
        message = refusal(tmp_path, content, "a.csv", skip_bad=skip, **TARGETS)
        assert (
            f"a.csv:{first}: found a quoted cell that seems to contain rows in lines {first} to {first + 2}" in message
        )
    found = read(tmp_path, "\n".join(["source,targets", *rows, "t,z"]), "b.csv", **TARGETS)
    assert [e.source for e in found] == ["s1", "t"]
    assert any("b.csv:2: found a cell" in line and "data.csv_quotes = letters its lines" in line for line in said)


def test_quoted_cells_in_a_tsv_are_reported(tmp_path, said):
    """The error of a row with a split cell states the reason; with the setting the row is complete."""
    content = 'source\ttargets\n"a ""b"""\tx\n"c\td"\ty\n"e\nf"\tz\n'
    unless = "read as text, unless data.csv_quotes = quote"
    message = refusal(tmp_path, content, "a.tsv", **TARGETS)
    assert "a.tsv:3: found 3 columns; expected 2 (source, targets); quotes are read as text, unless" in message
    assert [x.rpartition("/")[2] for x in said] == [f"a.tsv:2: found a cell in quotes, which are {unless}"]
    said.clear()
    found = read(tmp_path, content, "a.tsv", csv_quotes="quote", **TARGETS)
    assert [e.source for e in found] == ['a "b"', "c\td", "e\nf"] and not said
    with pytest.raises(UserError, match=r"data\.csv_quotes: found 'on'; expected one of auto, quote, letters"):
        check(Config(data=DataConfig(csv_quotes="on")), where="here")


# Ids that a missing id turned into floats.


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_integral_floats_become_integer_ids(name, tmp_path):
    """If one id is missing, the others become floats; its line number is its id, if no other record has that."""
    ids = [1.0, None, 2.0, -3.0, 2.0**52, 10.0, None]
    path, values = tmp_path / name, [{"id": x, "source": f"s{i}", "targets": ["x"]} for i, x in enumerate(ids)]
    if name == "a.jsonl":
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), path)
    found = [e.id for e in make_task(DataConfig(train=str(path))).examples("train")]
    assert found == ["1", f"{path}:2", "2", "-3", str(2**52), "10", "7"]
    twice = [{"id": 9}, {}, {}, {}, {"id": 5}, {"id": 5}]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"source": f"s{i}", "targets": [], **x}) + "\n" for i, x in enumerate(twice)))
    with pytest.raises(UserError, match=r"c\.jsonl:6: \"id\": found '5' again; it was used in line 5"):
        make_task(DataConfig(train=str(path))).examples("train")
    later = [{"id": 3.0}, {"id": 4.0}, {}, {}]  # the line's number is already the id of another record
    path = tmp_path / "b.jsonl"
    path.write_text("".join(json.dumps({"source": f"s{i}", "targets": [], **x}) + "\n" for i, x in enumerate(later)))
    found = [e.id for e in make_task(DataConfig(train=str(path))).examples("train")]
    assert found == ["3", "4", f"{path}:3", f"{path}:4"]


@pytest.mark.parametrize(
    "given, expected",
    [
        (np.float32(7), 7),
        (np.float64(-7), -7),
        (decimal.Decimal("12345678901234567890"), 12345678901234567890),
        (decimal.Decimal("3.00"), 3),
        (np.int64(2**60), 2**60),
        ("1.0", "1.0"),  # texts are not changed
        (float("nan"), "5"),
        (decimal.Decimal("NaN"), "5"),
    ],
    ids=repr,
)
def test_ids_that_are_read(given, expected):
    found = id_of({"id": given}, "a.parquet:5")
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("given", [1.5, float("inf"), 2.0**53, 1.2345e18, True, decimal.Decimal("1.5"), 1j], ids=repr)
def test_invalid_ids_are_refused(given):
    """From 2**53 on a float may stand for several whole numbers."""
    with pytest.raises(UserError, match=r'^a\.parquet:5: "id": found .*; expected text or a whole number'):
        id_of({"id": given}, "a.parquet:5")


def test_table_id_ending_in_0_is_reported(tmp_path, said):
    """It may be the number of a section, so it is not changed."""
    content = "id,source,targets\n1.0,a,x\n,b,x\n2.0,c,x\n"
    assert [e.id for e in read(tmp_path, content, "a.csv", **TARGETS)] == ["1.0", "3", "2.0"]
    line = "a.csv:2: found an id that ends in .0, as whole numbers do in a column with a gap; it is not changed"
    assert [x.rpartition("/")[2] for x in said] == [line]
    said.clear()
    read(tmp_path, "id,source,targets\n1.1,a,x\nv1.0,b,x\n10,c,x\n", "b.csv", **TARGETS)
    assert not said


# Empty answers.


def test_examples_without_an_answer_are_counted_skipped_or_refused(tmp_path, tokenizer, said):
    """They are counted, left out or refused; a row without tokens is no answer."""
    rows = [["sang"], [], ["</s>"], ["</s> ", " </s></s>"], ["</s>", "slept"], ["~"]]
    examples = [Example(str(i), "x", tuple(row), f"a.jsonl:{i}") for i, row in enumerate(rows)]
    found = "3 of 6 training examples have no answer"
    assert answered(examples, tokenizer, "keep") == examples
    assert said == [f"{found}, such as a.jsonl:1; they teach the model to generate no rows (data.empty_targets = keep)"]
    said.clear()
    assert [e.id for e in answered(examples, tokenizer, "skip")] == ["0", "4", "5"]
    assert said == [f"{found}, such as a.jsonl:1; they are left out (data.empty_targets = skip)"]
    with pytest.raises(UserError, match=f"^a.jsonl:1: found no answer .{found}.; expected an answer"):
        answered(examples, tokenizer, "refuse")
    with pytest.raises(UserError, match="found skip, but 2 of 2 training examples have no answer"):
        answered(examples[1:3], tokenizer, "skip")
    said.clear()
    assert answered(examples[:1], tokenizer, "refuse") == examples[:1] and not said


# One file for all splits.


def parted(path, shares="0.8,0.1,0.1", seed=0, **settings):
    task = make_task(DataConfig(train=str(path), split=shares, split_seed=seed, **settings))
    return {split: task.examples(split) for split in ("train", "dev", "test")}


def test_one_file_is_split(tmp_path, said):
    """Shares are about as requested, by the source alone: new lines move no others, and equal lines stay together."""
    path = tmp_path / "all.jsonl"
    values = [{"id": f"r{i}", "source": f"text {i % 1000}", "targets": [str(i)]} for i in range(1200)]

    def write(values):
        path.write_text("".join(json.dumps(value) + "\n" for value in values))

    write(values)
    parts = parted(path)
    assert sorted(e.id for part in parts.values() for e in part) == sorted(value["id"] for value in values)
    assert 900 < len(parts["train"]) < 1020 and 80 < len(parts["dev"]) < 160 and 80 < len(parts["test"]) < 160
    where = {split: {e.source for e in part} for split, part in parts.items()}
    assert not where["train"] & where["dev"] and not where["train"] & where["test"] and not where["dev"] & where["test"]
    counts = ", ".join(f"{len(part)} {split}" for split, part in parts.items())
    assert len(said) == 1
    assert said[0].startswith(f"{path}: 1200 examples, divided by data.split: {counts}; 400 have the same source as")
    again = np.random.default_rng(0).permutation(len(values)).tolist()
    write([{"id": f"new{i}", "source": f"other {i}", "targets": []} for i in range(50)] + [values[i] for i in again])
    later = parted(path)
    for split, part in parts.items():
        assert {e.id for e in later[split] if not e.id.startswith("new")} == {e.id for e in part}
    other = parted(path, seed=1)
    assert {e.id for e in other["dev"]} != {e.id for e in later["dev"]}
    assert parted(path, "1,0,0")["dev"] == [] and len(parted(path, "0.5,0.5")["dev"]) > 500


TWINS = ["the baker sang ; late", "the baker sang ; late ", "the  baker sang ; late", "the\u00a0baker sang ; late"]
TWINS += ["the baker sang ; late\n", "\tthe baker\r\nsang ; late", "the baker\u3000sang ; late"]
TWINS += ["\ufeffthe baker sang ; late", "the\u200bbaker sang ; late", "the baker sa\x07ng ; late"]
TWINS += ["the baker sang \uff1b late", "the baker sang \u037e late"]  # semicolons of full width, and Greek


def test_equivalent_sources_are_in_one_split(tmp_path, said):
    """Different white space and compatible Unicode forms are equivalent; other letters and case are not."""
    texts = [text.replace("late", f"late {i}") for i in range(40) for text in TWINS]
    texts += [f"caf{e} {i}" for i in range(40) for e in ("\u00e9", "e\u0301")]
    values = [{"source": text, "targets": []} for text in texts]
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    parts = parted(path, "0.5,0.3,0.2")
    where = {e.source: split for split, part in parts.items() for e in part}
    for i in range(40):
        assert len({where[text.replace("late", f"late {i}")] for text in TWINS}) == 1
        assert where[f"caf\u00e9 {i}"] == where[f"cafe\u0301 {i}"]
    assert {len({where[f"caf\u00e9 {i}"] for i in range(40)}), len(parts["dev"]) > 0} == {3, True}
    assert said[-1].endswith(f"; {len(texts)} have the same source as another example, and are in the same part")
    others = ["The baker sang", "the baker sang", "the bakersang", "the baker sang."]
    assert len({*map(normalized, others)}) == 4


def test_texts_are_read_as_sentencepiece_reads_them():
    """T5's and mT5's rule is tested for each character, without characters that are newer than the rule."""
    import sentencepiece

    plainly = {"remove_extra_whitespaces": True, "escape_whitespaces": False, "add_dummy_prefix": False}
    rule = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc", **plainly)
    known = [code for code in (*range(1, 0xD800), *range(0xE000, 0x11000)) if unicodedata.category(chr(code)) != "Cn"]
    other = [code for code in known if rule.normalize(f"a{chr(code)}b") != normalized(f"a{chr(code)}b")]
    assert [*map(hex, other)] == ["0x85", "0x344", "0xff5e"]  # a line end, a sign of two characters, and a wide tilde


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"split": "0.8,0.1"}, "found '0.8,0.1'; expected the shares of train, dev and test"),
        ({"split": "0.8"}, "found '0.8'"),
        ({"split": "0.8,0.1,0.1,0"}, "found '0.8,0.1,0.1,0'"),
        ({"split": "1.5,-0.5,0"}, "found '1.5,-0.5,0'"),
        ({"split": "80%,10%,10%"}, "found '80%,10%,10%'"),
        ({"split": "nan,0.5,0.5"}, "found 'nan,0.5,0.5'"),
        ({"split": "0.8,0.1,0.1", "dev": "dev.jsonl"}, "and a file as data.dev"),
        ({"split": "0.8,0.1,0.1", "test": "test.jsonl"}, "and a file as data.test"),
    ],
)
def test_invalid_shares_are_refused(settings, words, tmp_path):
    message = refusal(tmp_path, GOOD, **settings)
    assert message.startswith("data.split: ") and words in message


def test_file_for_a_split_without_a_share_is_accepted(tmp_path):
    (tmp_path / "test.jsonl").write_text(GOOD * 1)
    (tmp_path / "all.jsonl").write_text("".join(GOOD.replace('"x"', f'"{i}"') for i in range(50)))
    parts = parted(tmp_path / "all.jsonl", "0.8,0.2", test=str(tmp_path / "test.jsonl"))
    assert Counter({split: len(part) for split, part in parts.items()}).total() == 51 and len(parts["test"]) == 1
    task = FilesTask(DataConfig(train="all.jsonl", split="0.9,0.1", test=""))
    assert [task.has(split) for split in ("train", "dev", "test")] == [True, True, False]


@pytest.mark.parametrize(
    "value, words",
    [
        (b"x", "bytes"),
        (bytearray(b"x"), "bytes"),
        (datetime.date(2024, 1, 2), "a date or a time"),
        (datetime.datetime(2024, 1, 2), "a date or a time"),
        (datetime.time(1), "a date or a time"),
        (datetime.timedelta(1), "a span of time"),
        (decimal.Decimal("3.10"), "the number 3.10"),
        (np.float32(0.5), "the number 0.5"),
        (np.int64(3), "the number 3"),
        (np.str_("x"), "text"),
        (np.zeros(2), "a value of type ndarray"),
        ((1, 2), "a list"),
        (None, "null"),
        (True, "true or false"),
        (1.5, "the number 1.5"),
        ({}, "an object"),
    ],
    ids=repr,
)
def test_values_of_all_types_are_described(value, words):
    assert kind(value) == words


def test_parquet_with_other_types_than_text(tmp_path):
    for cell, words in (
        (b"x", "found bytes"),
        (datetime.date(2024, 1, 2), "found a date"),
        (decimal.Decimal("1.5"), "1.5"),
    ):
        table = pyarrow.Table.from_pylist([{"source": cell, "targets": ["x"]}])
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(UserError, match=rf'a\.parquet:1: "source": .*{words}.*; expected text'):
            make_task(DataConfig(train=str(tmp_path / "a.parquet"))).examples("train")


def test_records_in_memory_are_read(tmp_path):
    """Their ids are the part after the last colon, or their own whole numbers, including NumPy's."""
    task = FilesTask(DataConfig(targets="rows"))
    seven = {"id": np.int64(7), "source": "b", "rows": []}
    found = task.examples_of([("frame:0", {"source": "a", "rows": ("x",)}), ("frame:1", seven)])
    assert [(e.id, e.targets, e.place) for e in found] == [("0", ("x",), "frame:0"), ("7", (), "frame:1")]
    with pytest.raises(UserError, match=r'^frame:0: found no "rows"; expected a list'):
        task.examples_of([("frame:0", {"source": "a"})], "frame")


def test_a_delimiter_is_needed_only_where_it_is_used():
    check(Config(data=DataConfig(delimiter="")), where="here")
    with pytest.raises(UserError, match=r"data\.delimiter: found nothing"):
        check(Config(data=DataConfig(delimiter="", rows="delimiter")), where="here")


def test_metric_is_from_the_config_or_the_task():
    metrics = [make_task(DataConfig(task=task)).metric for task in ("demo", "jsonl", "kp20k", "pubmed")]
    assert metrics == ["exact", "exact", "keyphrases_kp20k", "rouge_score"]
    tasks = [make_task(DataConfig(task=task, metric="rouge", rows="sentences")) for task in ("csv", "jsonl", "msqa")]
    assert {task.metric for task in tasks} == {"rouge"}


def test_a_template_keeps_doubled_braces():
    template = Template("{{x}} {a}{b}", key="k")
    assert template.fields == ("a", "b") and template.fill({"a": "{b}", "b": "2"}) == "{x} {b}2"


def test_plain_text_replaces_quotes_spaces_and_marks():
    assert plain_text(" a\n``b''  `c' <digit>\t", (("<digit>", "#"),)) == "a \"b\" 'c' #"


def test_t5_tokenizer_keeps_plain_text(real_data):
    from pipejax.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(real_data / "t5_tokenizer")
    text = plain_text("``a'' `b' <dig> <cit> il <digit>", (("<digit>", "#"), ("<dig>", "#"), ("<cit>", "[cit]")))
    assert 2 not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert 2 in tokenizer.encode("``a'' <digit>")


def test_keyphrases_in_order_of_appearance():
    """Every way to place a phrase is tried as the reference, with words that often share stems."""
    rng, stem = np.random.default_rng(0), PorterStemmer().stem
    words = ["graph", "Graphs", "graphing", "tree", "trees", "of", "set", "sets", "unset", "."]
    for _ in range(200):
        document = list(rng.choice(words, rng.integers(0, 12)))
        phrases = [" ".join(rng.choice(words, rng.integers(1, 4))) for _ in range(6)]
        ordered = keyphrases(" ".join(document), phrases)
        stems = [stem(word.lower()) for word in document]

        def places(phrase, stems=stems):
            wanted = [stem(word.lower()) for word in phrase.split()]
            return [i for i in range(len(stems)) if stems[i : i + len(wanted)] == wanted]

        assert sorted(ordered) == sorted(set(phrases))
        present = [phrase for phrase in ordered if places(phrase)]
        assert ordered[: len(present)] == present
        firsts = [places(phrase)[0] for phrase in present]
        assert firsts == sorted(firsts)
        given = {phrase: phrases.index(phrase) for phrase in ordered}
        absent = [given[phrase] for phrase in ordered[len(present) :]]
        assert absent == sorted(absent)
        for a, b in itertools.pairwise(present):  # phrases at one place keep their given order
            assert places(a)[0] < places(b)[0] or given[a] < given[b]


@pytest.mark.parametrize(
    "content, name, settings, line",
    [
        (
            "id,text,targets\n1,a,b\n",
            "a.csv",
            {"rows": "delimiter"},
            'a.csv:2: found no "source"; expected one (keys: id, text, targets; data.source_template makes the source '
            'of other fields, such as "{text}")',
        ),
        (
            '{"doc no": "a", "body": "x", "targets": []}\n',
            "a.jsonl",
            {},
            'a.jsonl:1: found no "source"; expected one (keys: doc no, body, targets; data.source_template makes the '
            'source of other fields, such as "{body}")',
        ),
        (
            '{"source": "x", "vendor": "a", "tags, all": "b"}\n',
            "a.jsonl",
            {},
            'a.jsonl:1: found no "targets"; expected a list of texts (keys: source, vendor, tags, all; data.targets '
            'names another field, or several columns, such as "tags, all")',
        ),
        (
            "source,answer\na,b\n",
            "a.csv",
            {"rows": "delimiter"},
            'a.csv: found no "targets" in any record; expected the field in some records (keys: source, answer; '
            "data.targets names another field, or several columns, such as answer)",
        ),
        ('{"id": 1}\n', "a.jsonl", {}, 'a.jsonl:1: found no "source"; expected one (keys: id)'),
        (
            '{"text": "x", "targets": []}\n',
            "a.jsonl",
            {"source_template": "{body}"},
            'a.jsonl:1: found no "body"; expected one (keys: text, targets)',
        ),
    ],
)
def test_missing_source_message_names_setting_and_fields(content, name, settings, line, tmp_path):
    assert refusal(tmp_path, content, name, **settings).endswith(line)


def test_trained_model_suggests_no_setting_for_missing_fields():
    task = make_task(DataConfig(source_template="{title}"))
    with pytest.raises(UserError, match=r'x:1: found no "title"; expected one \(keys: source\)$'):
        task._fill({"source": "x"}, "x:1", learned=True)
