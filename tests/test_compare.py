"""Comparisons of entries on one split."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pipejax import metrics
from pipejax.apps import demo
from pipejax.apps.compare import bootstrap, compare_command, measurement, quality_page
from pipejax.apps.compare.entries import Entry, open_all, parse
from pipejax.apps.compare.measurement import Results, blocks_of, measure
from pipejax.config import Config, DataConfig, DecodeConfig
from pipejax.data.examples import Example
from pipejax.inference.generator import Generator
from pipejax.inference.programs import peak_bytes
from pipejax.inference.report import Report
from pipejax.inference.sources import Source
from pipejax.offline import evaluation
from pipejax.system.errors import UserError
from pipejax.testing.recomputation import TOY, random_params
from pipejax.training import train_command
from support import tiny_run


@pytest.mark.parametrize(
    "text, expected",
    [
        ("run=a", Entry("a", "a")),
        ("run=a/b,method=sequential", Entry("a/b,method=sequential", "a/b", "sequential")),
        ("run=a,draft=source,name=x", Entry("x", "a", overrides=("decode.draft=source",))),
        ("run=a,b,best=true", Entry("a,b,best=true", "a,b", best=True)),  # a comma in the name of a directory
        (
            "run=a,decode.beams=4,grid.delay=2,name=4 beams",
            Entry("4 beams", "a", overrides=("decode.beams=4", "grid.delay=2")),
        ),
        ('run=a,grid.row_names=["x","y"],name=r', Entry("r", "a", overrides=('grid.row_names=["x","y"]',))),
        ("run=a,method=mine:Own,name=own", Entry("own", "a", overrides=("method=mine:Own",))),
    ],
)
def test_entries_are_parsed(text: str, expected: Entry) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text, place, found",
    [
        ("method=sequential", "--entry", "'method=sequential'"),
        ("runs/a", "--entry", "'runs/a'"),
        ("run=", "--entry", "'run='"),
        ("run=a,run=b", "--entry", "'run=a,run=b', with a key twice"),
        ("run=a,metod=sequential", "--entry", "'metod'"),
        ("run=a,method=sequentail", "--entry: method", "'sequentail'"),
        ("run=a,best=yes", "--entry: best", "'yes'"),
    ],
)
def test_wrong_entries_are_refused(text: str, place: str, found: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text)
    assert (error.value.place, error.value.found) == (place, found)


@pytest.mark.parametrize("count, batch", [(1, 1), (19, 1), (20, 1), (21, 1), (100, 8), (3, 8), (1000, 8), (161, 8)])
def test_blocks_are_whole_batches(count: int, batch: int) -> None:
    blocks = blocks_of(count, batch)
    assert [i for block in blocks for i in block] == list(range(count)) and len(blocks) <= measurement.BLOCKS
    assert all(len(block) % batch == 0 for block in blocks[:-1]) and len({len(block) for block in blocks[:-1]}) <= 1


class Scripted:
    """A generator whose answers and seconds are in a table; `calls` lists the calls of all generators."""

    default_method = "pipelined"
    programs = None
    calls: ClassVar[list[tuple[str, tuple[str, ...]]]] = []

    def __init__(self, name: str, right: list[bool], seconds: float) -> None:
        self.name, self.right, self.seconds = name, right, seconds

    def make_strategy(self, method: str) -> str:
        return method

    def decode(self, examples: list[Example], **more: Any) -> tuple[list[dict[str, Any]], Report]:
        assert more["times_encoder"] and more["metric"] == "exact"
        Scripted.calls.append((self.name, tuple(example.id for example in examples)))
        more["tick"](len(examples))
        report = Report(seconds=self.seconds * len(examples), encoder_seconds=0.1 * len(examples))
        report.truncated["time_max"] += 1
        return [{"steps": 5 + int(x.id), "calls": 4, "right": self.right[int(x.id)]} for x in examples], report


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(own: Scripted, examples: Any, records: list[dict[str, Any]], metric: str) -> list[dict[str, float]]:
        gold = [["a"]] * len(records)
        return metrics.per_document(metric, [""] * len(gold), gold, [["a"] if x["right"] else ["b"] for x in records])

    Scripted.calls = []
    monkeypatch.setattr(measurement, "decode_examples", lambda own, examples, **more: own.decode(examples, **more))
    monkeypatch.setattr(measurement, "score_documents", score)
    monkeypatch.setattr(measurement, "peak_bytes", lambda programs, strategy: 3 << 20)


def measured(first: Scripted, second: Scripted, count: int, **more: Any) -> list[Results]:
    examples = [Example(str(i), "source", ("a",)) for i in range(count)]
    entries = [Entry(first.name, "run"), Entry(second.name, "run", "sequential")]
    generators: Any = [first, second]
    return measure(entries, generators, [examples, examples], metric="exact", seed=0, **more)


def test_entries_take_turns_on_the_same_examples(scripted: None) -> None:
    ticks: list[int] = []
    first, second = Scripted("one", [True] * 45, 0.5), Scripted("two", [True] * 45, 0.25)
    measured(first, second, 45, batch_size=1, tick=ticks.append)
    warm, timed = Scripted.calls[:2], Scripted.calls[2:]
    assert warm == [("one", ("0", "1", "2")), ("two", ("0", "1", "2"))]
    pairs = [timed[i : i + 2] for i in range(0, len(timed), 2)]
    assert all({name for name, _ in pair} == {"one", "two"} and pair[0][1] == pair[1][1] for pair in pairs)
    assert [i for pair in pairs for i in pair[0][1]] == [str(i) for i in range(45)]
    assert {pair[0][0] for pair in pairs} == {"one", "two"}  # both orders occur
    assert sum(ticks) == 2 * (45 + 3)


def test_results_are_means_and_ratios_with_paired_intervals(scripted: None) -> None:
    chance = np.random.default_rng(1)
    right = [chance.random(60) < share for share in (0.5, 0.8)]
    first, second = Scripted("one", right[0].tolist(), 0.5), Scripted("two", right[1].tolist(), 0.3)
    one, two = measured(first, second, 60, batch_size=1)
    assert (one.method, two.method) == ("pipelined", "sequential")
    assert one.scores["em_f1"][0] == pytest.approx(100 * right[0].mean())
    assert one.gains["em_f1"] == one.gains["steps"] == (0, 0, 0) and one.speed_ratio == (1, 1, 1)
    assert two.steps[0] == pytest.approx(5 + np.arange(60).mean()) and two.calls == (4, 4, 4)
    assert (two.seconds, two.encoder_seconds) == pytest.approx((0.3, 0.1))
    assert two.speed_ratio[0] == pytest.approx(0.5 / 0.3) and two.decoder_speed_ratio[0] == pytest.approx(2)
    assert two.truncated == {"time_max": 20} and two.peak_bytes == 3 << 20
    # F1 is 1 if an answer is correct. The same quantiles, from differences and other samples:
    differences = 100 * (right[1].astype(float) - right[0])
    drawn = [chance.choice(differences, 60).mean() for _ in range(4000)]
    gain, low, high = two.gains["em_f1"]
    assert gain == pytest.approx(differences.mean())
    assert (low, high) == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=2.0)


def test_intervals_of_times_are_paired_by_block() -> None:
    """A machine that is slow for some time slows both entries, so the ratio has a narrow interval."""
    slow = [1.0, 5.0, 1.0, 9.0, 2.0]
    first = [{"seconds": 2 * x, "encoder_seconds": 0.0} for x in slow]
    second = [{"seconds": x, "encoder_seconds": 0.0} for x in slow]
    assert bootstrap.intervals([first, second], measurement._speed_ratios)["whole"] == pytest.approx((2, 2, 2))


def result(name: str, score: tuple[float, float, float], seconds: float) -> Results:
    three = (1.0, 0.9, 1.1)
    gains = {"em_f1": (0.0, -1.0, 1.0)}
    return Results(
        Entry(name, "run"), "pipelined", {"em_f1": score}, gains, three, three, {}, seconds, 0.0, three, three, None
    )


def test_points_are_placed_by_score_and_time() -> None:
    results = [result("a <b>", (50.0, 40.0, 60.0), 0.1), result("second", (80.0, 70.0, 90.0), 0.4)]
    about = {"headline": "em_f1", "examples": 1, "split": "dev", "task": "csv", "batch_size": 1, "device": "a & b"}
    about |= {"confidence": 0.95, "bootstrap_samples": 2000, "bootstrap_seed": 0}
    page = quality_page.page(results, about, compare_command.HEADER, compare_command.cells)
    assert "a &lt;b&gt;" in page and "a &amp; b" in page and "1 example of the dev split" in page
    circles = [
        (float(x), float(y)) for x, y in re.findall(r'<circle class="c\d" cx="([\d.]+)" cy="([\d.]+)" r="5">', page)
    ]
    bars = [(float(y), float(z)) for y, z in re.findall(r'<path class="c\d" d="M[\d.]+ ([\d.]+)V([\d.]+)"', page)]
    left, width = quality_page.LEFT, quality_page.WIDTH - quality_page.LEFT - quality_page.RIGHT
    assert [x for x, _ in circles] == pytest.approx([left + width / 4, left + width], abs=0.1)  # 100 and 400 of 400 ms
    height = quality_page.HEIGHT - quality_page.TOP - quality_page.BOTTOM
    at = [quality_page.TOP + height * (90 - score) / 50 for score in (50, 80)]  # the axis is from 40 to 90
    assert [y for _, y in circles] == pytest.approx(at, abs=0.1)
    assert bars[0] == pytest.approx((at[0] + height / 5, at[0] - height / 5), abs=0.1)
    assert "1.00 [0.90, 1.10]" in page


def test_former_name_of_the_bootstrap_gives_the_present_function_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"pipejax\.metrics\.gap is now pipejax\.apps\.compare\.bootstrap\.gap"):
        assert metrics.gap is bootstrap.gap


def test_equal_scores_are_at_the_top_of_the_chart() -> None:
    perfect = (100.0, 100.0, 100.0)
    chart = quality_page.chart([result("one", perfect, 0.1), result("other", perfect, 0.2)], "em_f1")
    assert re.findall(r'cy="([\d.]+)"', chart) == [f"{quality_page.TOP:.1f}"] * 2


@pytest.mark.parametrize(
    "flags, place",
    [
        ([], "compare"),
        (["runs/a", "--entry", "run=b"], "compare"),
        (["runs/a", "--limit", "3"], "--limit"),
        (["runs/a", "--output", "x.html"], "--output"),
        (["--entry", "run=b", "--output", "x.svg"], "--output"),
        (["--entry", "run=b", "--set", "decode.beams=2"], "--set decode.beams=2"),
    ],
)
def test_incompatible_flags_are_refused(flags: list[str], place: str) -> None:
    with pytest.raises(UserError) as error:
        compare_command.main(flags)
    assert error.value.place == place


def test_memory_of_an_entry_includes_only_its_programs() -> None:
    """Entries of one run share a table of programs, which has the programs of all their methods."""

    def peaks(*methods: str) -> list[int | None]:
        own = Generator(Config(model=TOY), random_params(TOY, TOY.eos_token_id), None)
        for method in methods:
            own.decode([[5, 6, 1]], method=method)
        return [peak_bytes(own.programs, own.make_strategy(method)) for method in methods]

    larger, smaller = peaks("pipelined", "sequential")
    assert [smaller] == peaks("sequential") and None not in (larger, smaller) and larger != smaller


def test_settings_of_data_hold_for_all_entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All entries read sources of the same tokens, and split sequential answers at the same separator."""
    words, file = demo.DemoTask().tokenizer(), tmp_path / "test.jsonl"
    file.write_text(json.dumps({"source": " ".join(demo.NOUNS[:8]), "targets": [demo.NOUNS[0]]}) + "\n")
    params, seen = random_params(TOY, TOY.eos_token_id), list[tuple[int, list[str]]]()

    def opened(entries: list[Entry]) -> list[Any]:
        drafts = (DecodeConfig(), DecodeConfig(draft="source"))
        return [Generator(Config(model=TOY, decode=decode), params, words) for decode in drafts]

    def measured(entries: Any, generators: list[Any], examples: list[list[Example]], **more: Any) -> list[Results]:
        for own, given in zip(generators, examples, strict=True):
            rows = own.method("sequential").read(["bread / maps"], own.config.data.separator)[1]
            seen.append((len(own.ids_of(Source("", given[0].source))), rows))
        return [result(entry.name, (50.0, 40.0, 60.0), 0.1) for entry in entries]

    monkeypatch.setattr(compare_command, "open_all", opened)
    monkeypatch.setattr(compare_command, "measure", measured)
    settings = [f"data.test={file}", "data.max_source=5", "data.separator= / "]
    flags = ["--entry", "run=a", "--entry", "run=b,draft=source", "--task", "jsonl"]
    assert compare_command.main([*flags, *(x for setting in settings for x in ("--set", setting))]) == 0
    assert seen == [(5, ["bread", "maps"])] * 2


def test_each_entry_reads_sources_of_its_own_template(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of the first entry are the reference; a line reports a run with other rows."""
    words, file = demo.DemoTask().tokenizer(), tmp_path / "test.jsonl"
    file.write_text(json.dumps({"text": "red maps", "title": "bread", "targets": ["a"], "labels": ["b"]}) + "\n")
    params, given = random_params(TOY, TOY.eos_token_id), list[Example]()
    settings = [
        DataConfig(test=str(file), source_template="Title: {title} Text: {text}"),
        DataConfig(test=str(file), source_template="summarize: {text}", targets="labels"),
        DataConfig(test=str(file)),  # a converted checkpoint without a template
    ]

    def opened(entries: list[Entry]) -> list[Any]:
        made = [Generator(Config(model=TOY, data=data), params, words) for data in settings]
        for own in made:
            own.trained = own.config
        return made

    def measured(entries: Any, generators: list[Any], examples: list[list[Example]], **more: Any) -> list[Results]:
        given.extend(one for (one,) in examples)
        return [result(entry.name, (50.0, 40.0, 60.0), 0.1) for entry in entries]

    monkeypatch.setattr(compare_command, "open_all", opened)
    monkeypatch.setattr(compare_command, "measure", measured)
    assert compare_command.main([x for name in "abc" for x in ("--entry", f"run={name},name={name}")]) == 0
    assert [example.source for example in given] == [
        "Title: bread Text: red maps",
        "summarize: red maps",
        "Title: bread Text: red maps",
    ]
    assert [example.targets for example in given] == [("a",)] * 3
    line = "b: the rows of the first entry are the reference; the run has other data.targets\n"
    assert line in capsys.readouterr().err


@pytest.mark.slow
def test_entries_have_the_scores_and_steps_of_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = tiny_run.prepare(tmp_path / "data"), tmp_path / "run"
    assert train_command.main(["--config", str(config), "--workdir", str(run)]) == 0
    page, output = tmp_path / "page.html", tmp_path / "out.json"
    entries = [
        f"run={run},name=rows",
        f"run={run},method=sequential,name=<one row>",
        f"run={run},draft=jacobi,name=drafts",
    ]
    flags = [flag for entry in entries for flag in ("--entry", entry)]
    capsys.readouterr()
    more = ["--split", "dev", "--json", str(output), "--output", str(page)]
    assert compare_command.main([*flags, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["entry", "rows", "<one row>", "drafts"]
    found = json.loads(output.read_text())
    assert found["examples"] == 16 and found["blocks"] == 16 and "&lt;one row&gt;" in page.read_text()
    rows, sequential, drafts = found["entries"]
    for entry, method in ((rows, "pipelined"), (sequential, "sequential")):
        alone = tmp_path / f"{method}.json"
        evaluation.main(["--checkpoint", str(run), "--split", "dev", "--method", method, "--json", str(alone)])
        wanted = json.loads(alone.read_text())
        assert entry["method"] == method == wanted["method"]
        assert entry["scores"]["em_f1"]["value"] == pytest.approx(wanted["em_f1"])
        assert entry["steps"]["value"] == pytest.approx(wanted["steps"]) and entry["truncated"] == wanted["truncated"]
        assert 0 < entry["encoder_seconds"] < entry["seconds"] and entry["peak_bytes"] > 0
        assert entry["params_fp"] == wanted["params_fp"]
    assert drafts["scores"] == rows["scores"] and drafts["calls"]["value"] <= rows["calls"]["value"]
    assert drafts["settings"] == ["decode.draft=jacobi"]
    with pytest.raises(UserError, match=r"^--entry mine: decode\.beems"):
        open_all([parse(f"run={run},decode.beems=2,name=mine")])
