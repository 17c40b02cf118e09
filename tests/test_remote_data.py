"""Remote training data: URLs, patterns, splits of the hub, and files that are read during training."""

import gzip
import io
import json
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from pipejax.apps import demo
from pipejax.config import DataConfig
from pipejax.data.examples import Example, Shuffled, Stream, fingerprint
from pipejax.data.own_files import FilesTask
from pipejax.data.storage import files_of, inner_name
from pipejax.system.errors import UserError
from pipejax.training.loop import Examples, fit
from support.tiny import RUN_ON_ONE as CONFIG
from support.tiny import change, metrics, untimed

Records = list[dict[str, object]]
RECORDS: Records = [{"source": f"text {i}", "targets": [f"row {i}", "end"]} for i in range(23)]


class Hub(MemoryFileSystem):  # type: ignore[misc]
    """A hub in memory."""

    protocol = "hf"
    store: dict[str, object] = {}  # noqa: RUF012  # as the class above it has it
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("hf://"))
        return stripped


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """Files at memory:// and, as hf://, files of a hub."""
    fsspec.register_implementation("hf", Hub, clobber=True)
    system = fsspec.filesystem("memory")
    yield system
    for each in (system, fsspec.filesystem("hf")):
        each.store.clear()
        each.pseudo_dirs[:] = [""]
    sys.modules["fsspec.registry"]._registry.pop("hf")


def put(system: MemoryFileSystem, path: str, records: Records) -> None:
    """Writes records in the format of the suffix."""
    with system.open(path, "wb") as file:
        if path.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
        else:
            data = "".join(json.dumps(record) + "\n" for record in records).encode()
            file.write(gzip.compress(data) if path.endswith(".gz") else data)


def of(path: str, **settings: object) -> Sequence[Example]:
    """The training examples of a path."""
    task = FilesTask(DataConfig(train=path, **settings))  # type: ignore[arg-type]
    return task.stream() if task.config.stream else task.examples("train")


def sources(examples: Sequence[Example]) -> list[str]:
    """The sources in order."""
    return [example.source for example in examples]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_url_is_read_as_a_file(memory: MemoryFileSystem, name: str) -> None:
    put(memory, f"/data/{name}", RECORDS)
    found = of(f"memory://data/{name}")
    assert [(e.id, e.source, e.targets) for e in found] == [
        (str(i), f"text {i - 1}", (f"row {i - 1}", "end")) for i in range(1, 24)
    ]
    assert found[4].place == f"memory://data/{name}:5"


def test_a_pattern_names_files_here_and_elsewhere(memory: MemoryFileSystem, tmp_path: Path) -> None:
    for i, part in enumerate((RECORDS[:10], RECORDS[10:])):
        put(memory, f"/data/part-{i}.parquet", part)
        lines = "".join(json.dumps(record) + "\n" for record in part)
        (tmp_path / f"part-{i}.jsonl").write_text(lines)
    for path, suffix in (("memory://data/part-?.parquet", "parquet"), (f"{tmp_path}/*.jsonl", "jsonl")):
        found = of(path)
        assert sources(found) == [f"text {i}" for i in range(23)]
        assert [found[i].id for i in (0, 9, 10)] == [found[i].place for i in (0, 9, 10)]
        assert found[10].place.endswith(f"/part-1.{suffix}:1")
    (tmp_path / "odd*.jsonl").write_text(json.dumps(RECORDS[3]))  # an existing file has precedence
    assert sources(of(f"{tmp_path}/odd*.jsonl")) == ["text 3"]


def test_files_of_equal_name_have_different_ids(memory: MemoryFileSystem) -> None:
    for i in range(2):
        put(memory, f"/data/day={i}/p.jsonl", RECORDS[i : i + 2])
    assert [e.id for e in of("memory://data/*/p.jsonl")] == [
        f"memory:///data/day={i}/p.jsonl:{k}" for i in range(2) for k in (1, 2)
    ]


def test_a_split_of_the_hub(memory: MemoryFileSystem) -> None:
    hub, root = fsspec.filesystem("hf"), "/datasets/someone/notes@refs/convert/parquet"
    put(hub, f"{root}/plain/train/0000.parquet", RECORDS[:20])
    put(hub, f"{root}/plain/train/0001.parquet", RECORDS[20:])
    put(hub, f"{root}/plain/test/0000.parquet", RECORDS[:1])
    assert sources(of("hub:someone/notes[train]")) == [f"text {i}" for i in range(23)]
    put(hub, f"{root}/other/train/0000.parquet", RECORDS[5:6])
    assert sources(of("hub:someone/notes/other[train]")) == ["text 5"]
    for path, words in {
        "hub:someone/notes[train]": r"found the parts other, plain; expected one of them, as hub:someone/notes/PART",
        "hub:someone/notes/plain[dev]": r"the splits test, train; expected one .* as hub:someone/notes/plain\[SPLIT\]",
        "hub:someone/notes/plain": r"the splits test, train; expected one .* as hub:someone/notes/plain\[SPLIT\]",
        "hub:someone/notes": r"found the parts other, plain; expected one of them, as hub:someone/notes/PART\[SPLIT\]",
        "hub:someone/notes/other[test]": "found the splits train; expected",
        "hub:notes[train]": r"found no name of a data set on the hub; expected hub:OWNER/NAME\[SPLIT\]",
        "hub:someone/else[train]": "found the parts none",
    }.items():
        with pytest.raises(UserError, match=words):
            of(path)


@pytest.mark.parametrize(
    "path, words",
    {
        "memory://data/no.jsonl": r"no.jsonl: cannot be read \(FileNotFoundError: .*expected a file of JSON",
        "memory://data/no.parquet": r"no.parquet: cannot be read \(FileNotFoundError: .*expected JSON lines, CSV, Parq",
        "memory://no/*.jsonl": r"memory://no/\*.jsonl: found no files",
        "nowhere://a/b.jsonl": "nowhere://a/b.jsonl: ValueError: Protocol not known: nowhere",
    }.items(),
)
def test_url_that_cannot_be_read_raises_one_line(memory: MemoryFileSystem, path: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        of(path)


def packed(tmp_path: Path, **members: bytes) -> Path:
    """A zip archive of files in a directory `d`."""
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        for name, data in members.items():
            archive.writestr(f"d/{name.replace('_', '.')}", data)
    return tmp_path / "b.zip"


LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


@pytest.mark.parametrize(
    "url, names",
    [
        ("zip://d/a.jsonl::file://{}", ["zip://d/a.jsonl::file://{}"]),
        ("zip://d/*.jsonl::file://{}", ["zip://d/a.jsonl::file://{}"]),
        ("zip://d/b.csv.gz::file://{}", ["zip://d/b.csv.gz::file://{}"]),  # a table by its own name
        ("zip://d/c.parquet::file://{}", ["zip://d/c.parquet::file://{}"]),
        ("zip://d/*.gz::memory://b.zip", ["zip://d/b.csv.gz::memory://b.zip"]),
        ("zip://d/a.jsonl::simplecache::memory://b.zip", ["zip://d/a.jsonl::simplecache::memory://b.zip"]),
        ("simplecache::zip://d/*.csv.gz::memory://b.zip", ["simplecache::zip://d/b.csv.gz::memory://b.zip"]),
        ("simplecache::memory://d/a.jsonl", ["simplecache::memory://d/a.jsonl"]),
        ("filecache::memory://d/*.jsonl", ["filecache::memory:///d/a.jsonl"]),
        ("simplecache::file://{}.jsonl", ["simplecache::file://{}.jsonl"]),
        ("simplecache::file://{}*.jsonl", ["simplecache::file://{}.jsonl"]),
    ],
)
def test_chained_urls_are_read(memory: MemoryFileSystem, tmp_path: Path, url: str, names: list[str]) -> None:
    """A member of an archive is open although no other object holds the archive; a pattern keeps the chain."""
    cells = "source,targets\n" + "".join(f"text {i},row {i}\n" for i in range(23))
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), table)
    members = {"a_jsonl": LINES, "b_csv_gz": gzip.compress(cells.encode()), "c_parquet": table.getvalue()}
    path = packed(tmp_path, **members)
    (tmp_path / "b.zip.jsonl").write_bytes(LINES)
    memory.pipe("/b.zip", path.read_bytes())
    memory.pipe("/d/a.jsonl", LINES)
    url, names = url.format(path), [name.format(path) for name in names]
    assert files_of(url) == names
    rows = "delimiter" if ".csv" in names[0] else "list"
    assert sources(of(url, rows=rows)) == [f"text {i}" for i in range(23)]
    streamed = of(url, rows=rows, stream=5)
    assert isinstance(streamed, Stream)
    drawn = Shuffled(streamed, seed=0)
    assert Counter(drawn[i].source for i in range(46)) == Counter(2 * [f"text {i}" for i in range(23)])


def test_chain_that_breaks_raises_one_line(memory: MemoryFileSystem, tmp_path: Path) -> None:
    """Causes: no archive, no file of this name, no such member, and a member that is damaged in the middle."""
    path = packed(tmp_path, a_jsonl=LINES * 400)
    (tmp_path / "bad.zip").write_bytes(path.read_bytes().replace(b"text 7", b"text 8", 1))
    memory.pipe("/a.zip", LINES)
    for url, words in {
        f"zip://d/a.jsonl::file://{tmp_path}/no.zip": "FileNotFoundError: .*expected a URL that fsspec can open",
        "zip://d/a.jsonl::memory://a.zip": "BadZipFile: .*expected a URL that fsspec can open",
        f"zip://d/no.jsonl::file://{path}": r"cannot be read \(.*expected a file of JSON lines",
        f"zip://no/*.jsonl::file://{path}": "found no files",
        f"zip://d/a.jsonl::file://{tmp_path}/bad.zip": r"cannot be read further \(BadZipFile: Bad CRC-32",
    }.items():
        with pytest.raises(UserError, match=f"^{re.escape(url)}: {words}") as caught:
            of(url)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "path, name",
    {
        "a.csv": "a.csv",
        "a::b/c.csv": "a::b/c.csv",  # no URL
        "s3://b/c.tsv.gz": "s3://b/c.tsv.gz",
        "zip://d/a.csv::s3://b/c.zip": "zip://d/a.csv",
        "simplecache::s3://b/c.tsv": "s3://b/c.tsv",
        "zip://d/a.pq::blockcache::https://h/c.zip": "zip://d/a.pq",
        "gzip://::s3://b/c.csv.gz": "s3://b/c.csv.gz",
    }.items(),
)
def test_inner_name_of_a_chained_url(path: str, name: str) -> None:
    assert inner_name(path) == name


def test_error_names_the_bad_line_of_a_remote_file(memory: MemoryFileSystem) -> None:
    put(memory, "/data/a.jsonl", [*RECORDS[:2], {"source": "x"}])
    with pytest.raises(UserError, match=r'memory://data/a.jsonl:3: found no "targets"'):
        of("memory://data/a.jsonl")
    assert len(of("memory://data/a.jsonl", skip_bad=True)) == 2


def stream(memory: MemoryFileSystem, counts: Sequence[int], size: int) -> Stream:
    """A stream of several files, with a number of examples in each."""
    first = 0
    for i, count in enumerate(counts):
        put(memory, f"/data/{i}.jsonl", RECORDS[first : first + count])
        first += count
    found = of("memory://data/*.jsonl", stream=size)
    assert isinstance(found, Stream)
    return found


@pytest.mark.parametrize("counts, size", [((23,), 5), ((23,), 23), ((23,), 100), ((9, 2, 12), 6)])
def test_each_pass_shuffles_all_examples_once(memory: MemoryFileSystem, counts: Sequence[int], size: int) -> None:
    given = stream(memory, counts, size)
    assert sources(given) == [f"text {i}" for i in range(min(size, 23))]  # a sample: the first buffer
    drawn = Shuffled(given, seed=1)
    passes = [[drawn[i].source for i in range(23 * k, 23 * (k + 1))] for k in range(4)]
    assert all(Counter(found) == Counter(f"text {i}" for i in range(23)) for found in passes)
    assert len({tuple(found) for found in passes}) == 4
    if len(counts) == 1:  # a buffer's examples stay in it
        for found in passes:
            numbers = [int(text.split()[1]) // size for text in found]
            assert numbers == sorted(numbers)
        if size == 5:  # each buffer has another order
            places = [int(text.split()[1]) % size for found in passes for text in found[:20]]
            assert len({(*places[i : i + size],) for i in range(0, len(places), size)}) > 12
    else:
        assert len({found[0] for found in passes}) > 1


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_file_order_differs_in_every_pass(seed: int) -> None:
    """Six passes over four files have at least four orders, each with all files; seed and pass determine the order."""
    orders = list[tuple[str, ...]]()

    def read(files: Sequence[str]) -> Iterator[list[Example]]:
        orders.append(tuple(files))
        return iter([[Example(name, name, ())] for name in files])

    def passes(seed: int) -> list[tuple[str, ...]]:
        drawn = Shuffled(Stream("abcd", read, 1), seed)
        orders.clear()
        found = ["".join(drawn[4 * k + i].source for i in range(4)) for k in range(6)]
        return [tuple(text) for text in found]

    found = passes(seed)
    assert len({*found}) >= 4 and all(sorted(order) == [*"abcd"] for order in found)
    assert orders[:5] == found[1:]  # in the order of the requests
    assert passes(seed) == found != passes(seed + 1)


def test_stream_of_tables_logs_once(memory: MemoryFileSystem, said: list[str]) -> None:
    """There is one line for all passes: quotes are text in a TSV; a CSV with rows lost in quotes ends the run."""
    memory.pipe("/t/a.tsv", "\n".join(["source\ttargets", *[f'"s{i}"\tx' for i in range(9)], 's9\t"', 't\t"']).encode())
    given = of("memory://t/*.tsv", stream=4, rows="delimiter")
    assert isinstance(given, Stream)
    drawn = Shuffled(given, seed=0)
    assert {drawn[i].source for i in range(33)} == {*[f'"s{i}"' for i in range(9)], "s9", "t"}
    assert sum("a cell in quotes, which are read as text" in line for line in said) == 1
    lost = ["source,targets", *[f's{i},12" x' for i in range(9)], 's9,"x', "s10,x", 's11,x"']
    memory.pipe("/c/a.csv", "\n".join(lost).encode())
    given = of("memory://c/a.csv", stream=4, rows="delimiter", skip_bad=True)
    assert isinstance(given, Stream)
    with pytest.raises(UserError, match=r"a\.csv:11: found a quoted cell that seems to contain rows in lines 11 to 13"):
        [Shuffled(given, seed=0)[i] for i in range(12)]


def test_example_depends_only_on_its_number_and_the_seed(
    memory: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    given = stream(memory, (9, 14), 6)
    whole = Shuffled(given, seed=1)
    wanted = [whole[i] for i in range(100)]
    for first in (0, 1, 5, 22, 23, 40, 99):
        caplog.clear()
        later = Shuffled(given, seed=1)
        assert [later[i] for i in range(first, 100)] == wanted[first:]
        assert (f"skipping to example {first}" in caplog.text) == (first >= 2 * 6)
    assert [whole[i] for i in (99, 50, 3, 98)] == [wanted[i] for i in (99, 50, 3, 98)]  # backwards as well
    other = Shuffled(given, seed=2)
    assert [other[i] for i in range(23)] != wanted[:23]


def test_latest_examples_are_not_read_again(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    given, calls = stream(memory, (23,), 5), list[object]()
    read = given.read

    def counted(files: Sequence[str]) -> Iterator[list[Example]]:
        calls.append(files)
        return read(files)

    monkeypatch.setattr(given, "read", counted)
    drawn = Shuffled(given, seed=0)
    for first in range(0, 90, 5):  # examples that one process reads again after another drew them
        assert [drawn[i].source for i in range(first, first + 5)] == [drawn[i].source for i in range(first, first + 5)]
    assert len(calls) == 1 + 90 // 23


def test_buffer_may_lack_fields_and_repeat_ids(memory: MemoryFileSystem) -> None:
    for i in range(2):
        more: dict[str, object] = {"more": "more"} if i else {}
        put(memory, f"/data/{i}.jsonl", [{"id": k, "source": f"{i} {k}", "targets": [], **more} for k in range(8)])
    given = of("memory://data/*.jsonl", stream=5, source_template="{source} {more}")
    assert isinstance(given, Stream)
    drawn = Shuffled(given, seed=0)
    assert len({drawn[i].source for i in range(16)}) == 16
    with pytest.raises(UserError, match='found no "less" in any record'):
        of("memory://data/*.jsonl", stream=5, source_template="{source} {less}")


def test_changed_files_make_a_different_stream(memory: MemoryFileSystem) -> None:
    given = stream(memory, (9, 7), 5)
    put(memory, "/data/2.jsonl", RECORDS[:2])
    more = of("memory://data/*.jsonl", stream=5)
    assert isinstance(more, Stream) and list(more) == list(given)
    assert (given.names, more.names) == (("0.jsonl", "1.jsonl"), ("0.jsonl", "1.jsonl", "2.jsonl"))
    assert fingerprint(given, names=given.names) != fingerprint(more, names=more.names)


def test_bad_lines_at_the_beginning_are_left_out(memory: MemoryFileSystem, caplog: pytest.LogCaptureFixture) -> None:
    bad: Records = [{"source": "x"} for _ in range(6)]
    put(memory, "/data/0.jsonl", [*bad, *RECORDS])
    given = of("memory://data/0.jsonl", stream=5, skip_bad=True)
    assert isinstance(given, Stream) and given[0].source == "text 0"
    drawn = Shuffled(given, seed=0)
    assert len({drawn[i].source for i in range(2 * len(RECORDS))}) == len(RECORDS)  # two passes
    told = [message for message in caplog.messages if message.endswith("; skipped")]
    assert len(told) == len(set(told)) == 6


def test_streams_need_files() -> None:
    with pytest.raises(UserError, match=r"a stream with data.task = demo; expected data.task = jsonl or csv$"):
        Examples.of(change(CONFIG, data={"stream": 24}))


def test_file_that_shrinks_raises_one_line(memory: MemoryFileSystem) -> None:
    drawn = Shuffled(stream(memory, (23,), 5), seed=0)
    assert drawn[24]
    put(memory, "/data/0.jsonl", RECORDS[:10])
    with pytest.raises(UserError, match=r"data.train: found \d+ examples; expected 23, as in the first pass"):
        [drawn[i] for i in range(24, 80)]


def test_connection_that_breaks_off_raises_one_line(memory: MemoryFileSystem) -> None:
    given = stream(memory, (23,), 5)

    def breaks(files: Sequence[str]) -> Iterator[list[Example]]:
        yield list(given)
        raise ConnectionResetError("reset by peer")

    given.read = breaks
    drawn = Shuffled(given, seed=0)
    with pytest.raises(UserError, match=r"data.train: cannot be read further \(ConnectionResetError: reset by peer\)"):
        [drawn[i] for i in range(6)]


@pytest.mark.parametrize("settings", [{"split": "0.8,0.1,0.1"}, {"empty_targets": "skip"}])
def test_settings_that_need_all_examples_are_refused(memory: MemoryFileSystem, settings: dict[str, str]) -> None:
    put(memory, "/data/a.jsonl", RECORDS)
    with pytest.raises(UserError, match=rf"data.{next(iter(settings))}: found '.*data.stream"):
        of("memory://data/a.jsonl", stream=5, **settings)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_streamed_run_resumes_exactly(memory: MemoryFileSystem, tmp_path: Path, said: list[str]) -> None:
    lines: Records = [
        {"id": e.id, "source": e.source, "targets": list(e.targets)} for e in list(demo.examples("train")[:60])
    ]
    put(memory, "/data/0.jsonl.gz", lines[:40])
    put(memory, "/data/1.jsonl.gz", lines[40:])
    demo.DemoTask().tokenizer().save(tmp_path / "words")
    config = change(
        CONFIG,
        data={"task": "jsonl", "train": "memory://data/*.gz", "stream": 24, "tokenizer": str(tmp_path / "words")},
        train={"steps": 8, "length_group": 2, "batch_size": 8},
    )
    assert fit(config, tmp_path / "whole") == 0
    assert any("2 files are read as needed, 24 examples at a time" in line for line in said)
    for steps in (3, 8):
        assert fit(change(config, train={"steps": steps}), tmp_path / "parts") == 0
    whole, parts = (untimed(metrics(tmp_path / name)) for name in ("whole", "parts"))
    assert [line for line in whole if line["event"] == "train"] == [line for line in parts if line["event"] == "train"]
    assert whole[-1]["params_fp"] == parts[-1]["params_fp"] and not any("epoch" in line for line in whole)
    with pytest.raises(UserError, match=r"data.stream: found 8; expected at least 16"):
        fit(change(config, data={"stream": 8}), tmp_path / "small")
