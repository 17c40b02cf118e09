"""pipejax bulk: shards of blocks of lines equal the output of pipejax decode, after any kill."""

import bz2
import datetime
import gzip
import importlib.util
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from pipejax import checkpoint
from pipejax.apps import demo
from pipejax.apps.bulk import bulk_command, shards
from pipejax.apps.bulk import workers as bulk
from pipejax.apps.bulk.blocks import Block, Reader, cut
from pipejax.apps.bulk.shards import Output, Shards
from pipejax.data.formats import read_records
from pipejax.data.lines import BadLines
from pipejax.data.tables import FOUND, Dialect
from pipejax.inference import loading
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.offline import records
from pipejax.system.errors import UserError
from support import oracle, tiny
from support.descendants import workers
from support.refusals import refuses

pytestmark = pytest.mark.usefixtures("compiled_once")

WORDS = [demo.examples("test")[i].source.split() for i in range(20)]
VALUES = [{"id": f"r{i}", "source": " ".join(words[: 1 + i * 7 % 12])} for i, words in enumerate(WORDS)]


def lines_of(values: Sequence[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path) -> Iterator[Path]:
    """A checkpoint that is opened once for each set of overrides, so that workers share compiled programs."""
    path = tmp_path_factory.mktemp("bulk") / "run"
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(314))
    checkpoint.save_params(path, tiny.RUN, params, tokenizer_source=tokenizer_files)
    known = dict[tuple[str, ...], Generator]()

    def load_once(path: str, *, best: bool, overrides: tuple[str, ...]) -> Generator:
        known[overrides] = known.get(overrides) or load(path, best=best, overrides=overrides)
        return known[overrides]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "load", load_once)
        patch.setattr(loading, "load", load_once)
        yield path


class Serial:
    """A pool of one worker in this process, which may be killed after some blocks."""

    def __init__(self, killed_after: int = 1000) -> None:
        self.killed_after, self.asked = killed_after, list[str]()

    def ask(self, work: bulk.BulkWork) -> dict[str, Any]:
        return bulk.result_or_error(bulk.describe, work)

    def map(self, work: bulk.BulkWork, blocks: Sequence[tuple[str, Block]]) -> Iterator[dict[str, Any]]:
        worker = bulk.Worker(work)
        for number, (name, block) in enumerate(blocks):
            if number == self.killed_after:
                raise KeyboardInterrupt
            self.asked.append(name)
            yield worker(name, block)


Run = Callable[..., Serial]


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Decodes files of the test's folder into `out`."""
    monkeypatch.chdir(tmp_path)

    def start(
        *patterns: str,
        block: int = 6,
        overrides: tuple[str, ...] = (),
        killed_after: int = 1000,
        skip_bad: bool = False,
    ) -> Serial:
        pool, files = Serial(killed_after), bulk.match_files(patterns)
        work = bulk.BulkWork(str(trained), str(tmp_path / "out"), str(tmp_path), overrides=overrides, skip_bad=skip_bad)
        bulk.decode_files(work, files, Output(Path("out")), pool, block=block)
        return pool

    return start


def decoded(trained: Path, source: str, *overrides: str, skip_bad: bool = False) -> bytes:
    """The output of pipejax decode."""
    opened = loading.load(str(trained), best=False, overrides=overrides)
    records.decode_file(opened, source, "expected", method=None, batch_size=None, skip_bad=skip_bad)
    return Path("expected").read_bytes()


def content() -> bytes:
    """The content of shards in the order of their names; none may be unfinished."""
    paths = sorted(Path("out/shards").iterdir())
    assert all(path.suffix == ".jsonl" and not path.name.startswith(".") for path in paths)
    return b"".join(path.read_bytes() for path in paths)


def manifest() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/manifest.json").read_text())
    return found


# Blocks.


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["plain", "gzip", "parquet"])
def test_blocks_hold_the_file(tmp_path: Path, kind: str, size: int) -> None:
    """Blocks are read in any order, with the lines of the file; a BOM, blank lines and CRLF are kept."""
    path = tmp_path / ("x.parquet" if kind == "parquet" else "x.jsonl")
    text = "\ufeff" + lines_of(VALUES[:4]) + "\n\n" + lines_of(VALUES[4:9]).replace("\n", "\r\n") + '{"id": "last"}'
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VALUES), path, row_group_size=4)
    else:
        path.write_bytes(text.encode() if kind == "plain" else gzip.compress(text.encode()))
    blocks = cut(str(path), size)
    total = len(VALUES) if kind == "parquet" else 12
    assert [block.first for block in blocks] == list(range(1, total + 1, size))
    assert sum(block.lines for block in blocks) == total
    reader = Reader(tmp_path)
    parts = {block.first: list(reader.read(block)) for block in reversed(blocks)}
    assert [line for first in sorted(parts) for line in parts[first]] == list(read_records(path))


TABLE = 'id;source\r\nr1;"the\nbaker"\nr2;"a;b"\n\nr3;c\nr4\n"x"y;z\nr5;"d\n\n"\nr6;e'


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_blocks_hold_the_rows_of_a_table(tmp_path: Path, pack: Callable[[bytes], bytes], size: int) -> None:
    """Blocks have whole rows, some of several lines; blank and bad rows count.

    Digests include names and the delimiter.
    """
    path = tmp_path / "x.csv"
    path.write_bytes(pack(("\ufeff" + TABLE).encode()))
    blocks = cut(str(path), size)
    assert len(blocks) == -(-8 // size) and blocks[0].first == 2 and sum(block.lines for block in blocks) == 11
    reader, bad, whole = Reader(tmp_path), BadLines("x", skip=True, most=9), BadLines("x", skip=True, most=9)
    parts = {block.first: list(reader.read(block, bad)) for block in reversed(blocks)}
    assert [row for first in sorted(parts) for row in parts[first]] == list(read_records(path, bad=whole))
    assert sorted(bad.messages) == sorted(whole.messages) and bad.count == 2
    assert [value["source"] for first in sorted(parts) for _, value in parts[first]] == [
        "the\nbaker",
        "a;b",
        "c",
        "d\n\n",
        "e",
    ]
    for other in (TABLE.replace("source", "text"), TABLE.replace("id;", "no;")):
        path.write_bytes(pack(("\ufeff" + other).encode()))
        assert not {block.digest for block in cut(str(path), size)} & {block.digest for block in blocks}
    for dialect in (Dialect(","), Dialect(quotes="letters")):
        assert not {b.digest for b in cut(str(path), size, dialect=dialect)} & {b.digest for b in cut(str(path), size)}


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("name, dialect", [("x.tsv", FOUND), ("x.csv", Dialect("\t", "letters"))])
def test_each_line_of_a_tsv_is_a_row_in_a_block(tmp_path: Path, name: str, dialect: Dialect, size: int) -> None:
    """Quotes have no effect in a TSV; if rows of a CSV are lost in a quote, the work ends, even with --skip-bad."""
    texts = ['"open', "b", 'c "d" e', 'f"', '"', '"whole"', "g"]
    path = tmp_path / name
    path.write_text("id\tsource\n" + "".join(f"r{i}\t{text}\n" for i, text in enumerate(texts)))
    blocks, reader = cut(str(path), size, dialect=dialect), Reader(tmp_path, dialect)
    assert [block.lines for block in blocks] == [len(texts[i : i + size]) for i in range(0, len(texts), size)]
    found = [value for block in blocks for _, value in reader.read(block)]
    assert found == [{"id": f"r{i}", "source": text} for i, text in enumerate(texts)]
    path = tmp_path / "y.csv"
    path.write_text("id,source\n" + "".join(f"r{i},{text}\n" for i, text in enumerate(texts)))
    bad = BadLines("y.csv", skip=True)
    with pytest.raises(UserError, match=r"y\.csv:2: found a quoted cell that seems to contain rows in lines 2 to "):
        [value for block in cut(str(path), size) for value in Reader(tmp_path).read(block, bad)]


@pytest.mark.parametrize("flags", [(), ("data.csv_quotes=quote",)])
def test_worker_uses_the_quote_setting_of_its_leader(run: Run, flags: tuple[str, ...], monkeypatch: Any) -> None:
    """The checkpoint or the command sets it, and the manifest records it."""
    read = list[object]()

    def seen(generator: Generator, placed: Any, *more: Any) -> Iterator[Any]:
        read.extend(value["source"] for _, value in placed)
        return iter(())

    monkeypatch.setattr(records, "read_sources", seen)
    Path("a.tsv").write_text('source\n"the baker"\n"a\n')
    if flags:
        Path("a.tsv").write_text('source\n"the baker"\n"a\nb"\n')
    run("a.tsv", overrides=flags)
    assert read == (["the baker", "a\nb"] if flags else ['"the baker"', '"a'])
    assert manifest()["settings"]["data.csv_quotes"] == ("quote" if flags else "auto")


def test_parquet_block_is_identified_by_its_rows(tmp_path: Path) -> None:
    """The way of writing has no effect; a block with another row, or with a row that is changed later, differs."""
    values = [{"id": i, "source": f"text {i}", "day": datetime.date(2024, 1, 1 + i)} for i in range(12)]
    path = tmp_path / "x.parquet"

    def blocks(values: Sequence[Any], **options: Any) -> list[Block]:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), path, **options)
        return cut(str(path), 5)

    first = blocks(values)
    assert [(block.first, block.lines) for block in first] == [(1, 5), (6, 5), (11, 2)]
    assert blocks(values, row_group_size=3, compression="none", use_dictionary=False) == first
    mended = blocks([*values[:6], values[6] | {"source": None}, *values[7:]])
    assert [a == b for a, b in zip(first, mended, strict=True)] == [True, False, True]
    with refuses("x.parquet:6"):
        list(Reader(tmp_path).read(first[1]))
    assert [value for _, value in Reader(tmp_path).read(mended[2])] == values[10:]


def test_changed_block_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(lines_of(VALUES))
    blocks = cut("x.jsonl" if Path.cwd() == tmp_path else str(path), 6)
    path.write_text(path.read_text().replace("r7", "r8", 1))
    assert list(Reader(tmp_path).read(blocks[0]))
    with refuses("x.jsonl:7"):
        list(Reader(tmp_path).read(blocks[1]))


# Shards.


def test_shards_equal_output_of_decode(run: Run, trained: Path) -> None:
    """Files of all kinds are decoded; lines without an id have their number in the file."""
    without = [{"source": value["source"]} for value in VALUES]
    Path("a.jsonl").write_text("\n" + lines_of(without) + "\n")
    Path("b.jsonl.gz").write_bytes(gzip.compress(lines_of(VALUES).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VALUES[:5]), "c.parquet")
    pool = run("[abc].*")
    assert len(pool.asked) == 4 + 4 + 1
    assert content() == b"".join(decoded(trained, name) for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"))
    found = manifest()
    assert found["complete"] and [given["path"] for given in found["inputs"]] == ["a.jsonl", "b.jsonl.gz", "c.parquet"]
    assert [shard["records"] for shard in found["shards"]] == [5, 6, 6, 3, 6, 6, 6, 2, 5]
    for shard in found["shards"]:
        assert shards._describe_shard(Path(shard["shard"]).name, Path("out", shard["shard"]).read_bytes(), []) == shard


@pytest.mark.slow
def test_several_answers_of_each_line(run: Run, trained: Path) -> None:
    """Samples are drawn by id and number, so blocks have no effect."""
    Path("a.jsonl").write_text(lines_of(VALUES[:5]))
    overrides = ("decode.samples=2", "decode.temperature=1")
    run("a.jsonl", block=3, overrides=overrides)
    assert content() == decoded(trained, "a.jsonl", *overrides)
    assert [shard["records"] for shard in manifest()["shards"]] == [6, 4]


def test_finished_shards_are_not_decoded_again(run: Run, trained: Path, said: list[str]) -> None:
    Path("a.jsonl").write_text(lines_of(VALUES))
    with pytest.raises(KeyboardInterrupt):
        run("a.jsonl", killed_after=2)
    assert said[-1] == "out: 2 of 4 shards are written; the same command resumes the work"
    assert not manifest()["complete"]
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in Path("out/shards").iterdir()}
    Path("out/shards/.left-behind").touch()
    pool = run("a.jsonl")
    assert len(pool.asked) == 2 and not {path.name for path in before} & set(pool.asked)
    assert all((path.stat().st_ino, path.stat().st_mtime_ns) == facts for path, facts in before.items())
    assert content() == decoded(trained, "a.jsonl") and manifest()["complete"]
    found = manifest()
    older = {"strategy" if key == "--method" else key: value for key, value in found["settings"].items()}
    assert "strategy" in older
    Path("out/manifest.json").write_text(json.dumps({**found, "settings": older}))  # a manifest of an older release
    assert run("a.jsonl").asked == [] and manifest() == found


def test_unreported_shard_of_a_dead_worker_is_kept(run: Run, trained: Path, monkeypatch: Any) -> None:
    """Another worker gets the block, and finds that its shard exists."""
    Path("a.jsonl").write_text(lines_of(VALUES))
    run("a.jsonl")
    expected = manifest()["shards"]
    monkeypatch.setattr(Output, "written", lambda *_: {})
    monkeypatch.setattr(Generator, "stream", None)
    run("a.jsonl")
    assert manifest()["shards"] == expected


def test_bad_line_ends_the_work_after_the_current_blocks(run: Run, trained: Path) -> None:
    """The message equals that of pipejax decode; after the line is corrected, the same command resumes."""
    bad = [*VALUES[:8], {"id": "x", "sauce": ""}, *VALUES[9:]]
    Path("a.jsonl").write_text(lines_of(bad))
    with pytest.raises(UserError) as told:
        run("a.jsonl")
    with pytest.raises(UserError) as expected:
        decoded(trained, "a.jsonl")
    assert str(told.value) == str(expected.value) and str(told.value).startswith("a.jsonl:9: ")
    assert len(manifest()["shards"]) == 1
    Path("a.jsonl").write_text(lines_of(VALUES))
    assert len(run("a.jsonl").asked) == 3
    assert content() == decoded(trained, "a.jsonl")


def test_bad_lines_are_left_out_and_listed_in_the_manifest(run: Run, trained: Path, said: list[str]) -> None:
    """The list survives a kill, and includes shards whose worker died before its report."""
    bad = ['{"source": "x"', '{"sauce": 1}', "[]", '{"source": ""}']
    lines = lines_of(VALUES).splitlines()
    Path("a.jsonl").write_text("\n".join([lines[0], *bad[:2], *lines[1:9], *bad[2:], *lines[9:]]) + "\n")
    Path("b.csv").write_text("id,source\nr1,the baker\nr2\nr3,a,b\nr4,sang\n")
    with pytest.raises(KeyboardInterrupt):
        run("a.jsonl", "b.csv", skip_bad=True, killed_after=2)
    with pytest.raises(UserError, match="holds other work: found --skip-bad = True; expected False"):
        run("a.jsonl", "b.csv")
    assert manifest()["skipped"] == 3
    said.clear()
    assert len(run("a.jsonl", "b.csv", skip_bad=True).asked) == 3
    found = manifest()
    assert content() == b"".join(decoded(trained, name, skip_bad=True) for name in ("a.jsonl", "b.csv"))
    assert found["skipped"] == 6 and sum(shard["records"] for shard in found["shards"]) == len(VALUES) + 2
    told = [error for shard in found["shards"] for error in shard.get("skipped", [])]
    assert [error.partition(": ")[0] for error in told] == [
        *(f"a.jsonl:{n}" for n in (2, 3, 12, 13)),
        *("b.csv:3", "b.csv:4"),
    ]
    assert "b.csv:3: found 1 column; expected 2 (id, source)" in told
    assert [line for line in said if line.endswith("; skipped")][:6] == [f"warning: {error}; skipped" for error in told]
    assert "warning: out: 6 bad lines skipped, 22 good ones kept" in said
    Path("out/manifest.json").write_text(json.dumps({**found, "shards": []}))
    assert run("a.jsonl", "b.csv", skip_bad=True).asked == [] and manifest() == found


def test_file_of_only_bad_lines_is_reported_at_the_end(run: Run) -> None:
    Path("a.jsonl").write_text(lines_of(VALUES[:3]))
    Path("b.jsonl").write_text('{"source": 3}\n[]\n')
    with refuses("b.jsonl", found="b.jsonl:1: "):
        run("?.jsonl", skip_bad=True)
    assert manifest()["complete"] and len(content().splitlines()) == 3


def test_corrected_parquet_repeats_only_the_block_of_the_bad_row(run: Run, trained: Path) -> None:
    def write(values: Sequence[Any], **options: Any) -> None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), "a.parquet", **options)

    write([*VALUES[:14], {"id": "x", "source": None}, *VALUES[15:]])
    with pytest.raises(UserError, match=r'^a\.parquet:15: "source": found null'):
        run("a.parquet")

    def identity(path: Path) -> tuple[int, int]:  # without the time of the last access
        return path.stat().st_ino, path.stat().st_mtime_ns

    before = {path.name: identity(path) for path in Path("out/shards").glob("[!.]*")}
    assert len(before) == 2
    write(VALUES, row_group_size=4, compression="none")
    assert len(run("a.parquet").asked) == 2
    assert {name: identity(Path("out/shards", name)) for name in before} == before
    assert content() == decoded(trained, "a.parquet") and manifest()["complete"]


def test_field_missing_from_all_lines_is_refused_first(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(bulk, "fields_of", lambda config: ("title", "source"))
    Path("a.jsonl").write_text('{"source": "b"\n{"title": "a"}\n{"source": "b"}\n')
    Path("b.jsonl").write_text('{"source": "b", "titel": "a"}\n')
    with pytest.raises(UserError, match=r'^b\.jsonl: found no "title" in any record.*did you mean "titel"'):
        run("a.jsonl", "b.jsonl")
    assert not Path("out").exists()


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\n"])
def test_errors_of_skipped_lines_are_read_again_with_any_characters(mark: str, tmp_path: Path) -> None:
    shards, errors = Shards(tmp_path, ""), [f'x:1: did you mean "text{mark}"?', "x:2: another"]
    shards.directory.mkdir()
    written = shards.write("a.jsonl", "{}\n", errors)
    assert shards.look("a.jsonl") == written and written["skipped"] == errors


def test_block_that_kills_its_process_is_skipped(tmp_path: Path) -> None:
    found = Shards(tmp_path, "")
    found.directory.mkdir()
    for _ in range(shards.ATTEMPTS):
        found.begin("x.jsonl")
    with pytest.raises(UserError, match=r"x\.jsonl: found 10 processes that died"):
        found.begin("x.jsonl")
    found.write("x.jsonl", "{}\n")
    found.begin("x.jsonl")


def test_a_worker_that_outlives_its_leader_does_not_stop_the_next(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    of_first, also_of_first, of_second = (Shards(tmp_path, run) for run in ("1", "1", "2"))
    of_first.stop()
    assert also_of_first.stopped and not of_second.stopped


# Refusals: one line, and nothing is changed.


@pytest.mark.parametrize(
    "change, words",
    [
        ("settings", "out: holds other work: found grid.time_max = 12; expected 9"),
        ("block", "out: holds other work: found --block = 6; expected 5"),
        ("skipping", "out: holds other work: found --skip-bad = False; expected True"),
        ("delimiter", "out: holds other work: found data.csv_delimiter = ''; expected ';'"),
        ("quotes", "out: holds other work: found data.csv_quotes = 'auto'; expected 'letters'"),
        ("more", "out: holds other work: found the number of inputs = 1; expected 2"),
        ("renamed", "out: holds other work: found input 1 = 'a.jsonl'; expected 'b.jsonl'"),
        ("line", "found a shard of lines"),
        ("shard", "differs from manifest.json"),
        ("manifest", "out/manifest.json: found no manifest of format 1"),
        ("locked", "--output out: in use"),
    ],
)
def test_output_of_another_decode_is_refused(run: Run, change: str, words: str) -> None:
    Path("a.jsonl").write_text(lines_of(VALUES))
    run("a.jsonl")
    options: dict[str, Any] = {}
    if change == "settings":
        options["overrides"] = ("grid.time_max=9",)
    elif change == "block":
        options["block"] = 5
    elif change == "skipping":
        options["skip_bad"] = True
    elif change == "delimiter":
        options["overrides"] = ("data.csv_delimiter=;",)
    elif change == "quotes":
        options["overrides"] = ("data.csv_quotes=letters",)
    elif change == "more":
        Path("b.jsonl").write_text(lines_of(VALUES))
    elif change == "renamed":
        Path("a.jsonl").rename("b.jsonl")
    elif change == "line":
        Path("a.jsonl").write_text(lines_of([*VALUES[:3], VALUES[5], *VALUES[4:]]))
    elif change == "shard":
        next(Path("out/shards").iterdir()).write_text("{}\n")
    elif change == "manifest":
        Path("out/manifest.json").write_text('{"format": 2}')
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    if change == "locked":
        with Output(Path("out")), pytest.raises(UserError, match=words):
            run("?.jsonl")
    else:
        with pytest.raises(UserError) as told:
            run("?.jsonl", **options)
        assert words in str(told.value) and "\n" not in str(told.value)
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_invalid_inputs_and_outputs_are_refused(run: Run, tmp_path: Path) -> None:
    Path("empty.jsonl").touch()
    Path("table.csv").touch()
    Path("folder").mkdir()
    Path("folder/mine").touch()
    for pattern, words in (
        ("*.parquet", r"--input \*\.parquet: found no file; expected JSON lines, CSV or Parquet"),
        ("*.csv", r"table\.csv: found no lines"),
        ("folder", "--input folder: found a directory"),
        ("*.jsonl", "empty.jsonl: found no lines; expected at least one source"),
    ):
        with pytest.raises(UserError, match=words):
            run(pattern)
    assert not Path("out").exists()
    with refuses("--output folder"):
        Output(Path("folder"))
    with pytest.raises(UserError, match=r"--output table\.csv: found a file; expected a directory"):
        Output(Path("table.csv"))


def test_missing_ray_raises_one_line(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "a.jsonl").write_text(lines_of(VALUES))
    flags = ["--checkpoint", str(trained), "--input", str(tmp_path / "*.jsonl"), "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"^bulk: found no ray; expected the packages of the extra pipejax\[ray\]"):
        bulk_command.main(flags)
    assert not (tmp_path / "out").exists()


# Ray itself.


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray, which the tests do not require")
def test_killed_worker_does_not_change_output(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad line gives one line of output; after a kill of a worker, records equal those of decode."""
    monkeypatch.chdir(tmp_path)
    values = [{"id": f"r{i}", "source": " ".join(WORDS[i % 20][: 1 + i % 12])} for i in range(600)]
    Path("a.jsonl").write_text(lines_of([*values[:-1], {}]))
    command = [sys.executable, "-m", "pipejax", "bulk", "--checkpoint", str(trained), "--input", "a.jsonl"]
    command += ["--output", "out", "--block", "10", "--workers", "2"]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("decoding: ")]
    assert ended.returncode == 2 and len(lines) == 3 and ended.stdout == "", ended.stderr
    assert lines[0] == "stopping after the blocks in progress are decoded"
    assert lines[2].startswith('error: a.jsonl:600: found no "source"')
    Path("a.jsonl").write_text(lines_of(values))
    for path in sorted(Path("out/shards").glob("*.jsonl"))[3:]:
        path.unlink()
    leader = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    while leader.poll() is None and not (
        len(list(Path("out/shards").glob("*.jsonl"))) > 6 and (running := workers(leader.pid))
    ):
        time.sleep(0.05)
    os.kill(running[0], signal.SIGKILL)
    assert leader.communicate()[1].endswith(" records/s\n") and leader.returncode == 0
    assert content() == decoded(trained, "a.jsonl")
