"""The tables of the paper: our results are in our columns, and reported results in the paper's columns."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import pytest

from lab.experiments.tables import __main__ as command
from lab.experiments.tables import bounds, paper
from lab.experiments.tables.cells import DTYPES, Cell, Way, evaluation, fresh, make, read, ways_of
from pipejax import config as config_lib
from pipejax import metrics
from pipejax.checkpoint import Store
from pipejax.checkpoint.fingerprint import digest, fingerprints
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError
from support.tiny import RUN_ON_ONE as CONFIG

GOLD = [["a cat", "a dog"]] * 6 + [["a cat", "a dog", "a cow"]] * 14


def lay(workdir, cell, split, *, right, seconds, strategy=None, steps=7.0, metric="spans", **more):
    """Writes an evaluation as `pipejax.offline.evaluation` does; the first `right` documents are correct."""
    way = Way(strategy or cell.objective, **more)
    run = workdir / cell.name
    path = evaluation(run, split, way)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (run / "best").exists():
        best(run, 1)
    predicted = [gold if i < right else ["nothing"] for i, gold in enumerate(GOLD)]
    lines = [
        {"id": str(i), "source": "", "gold": gold, "pred": rows}
        for i, (gold, rows) in enumerate(zip(GOLD, predicted, strict=True))
    ]
    path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = metrics.score(metric, [""] * len(GOLD), GOLD, predicted)
    headline = metrics.HEADLINES[metric]
    groups = [{"rows": 2, "documents": 6, headline: 1.0, "seconds": seconds}]
    groups.append({"rows": 3, "documents": 14, headline: 2.0, "seconds": 2 * seconds})
    found = {"metric": metric, "strategy": way.strategy, "examples": len(GOLD), "steps": steps, **scores}
    found |= {"examples_per_second": 1 / seconds, "by_rows": groups, "truncated": {"time_max": 5}}
    params = {"a": jnp.full(3, 1.0)}
    found |= {"peak_device_bytes": 3 * 2**20, "limit": None, "params_fp": digest(fingerprints(params))}
    path.write_text(json.dumps(found))


def best(run, step):
    """Writes weights as the best step of a run."""
    store = Store(run / "best", keep=1, writable=True)
    config = dataclasses.replace(CONFIG, model=None)  # no T5 has such parameters
    assert store.save(step, {"params": {"a": jnp.full(3, float(step))}}, config=config, wait=True) and store.close()


def cells_of(text, title, *start):
    """The cells of the only line that begins with `start` in the table with this title."""
    (part,) = [part for part in text.split("\n## ") if part.startswith(title)]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
    (found,) = [line for line in lines if tuple(line[: len(start)]) == start]
    return found


@pytest.fixture
def collected(tmp_path, capsys):
    sequential, pipelined = (Cell("msqa", "base", objective) for objective in ("sequential", "pipelined"))
    for split in ("dev", "test"):
        lay(tmp_path, sequential, split, right=10, seconds=0.5)
        lay(tmp_path, pipelined, split, right=5, seconds=0.2)
    lay(tmp_path, pipelined, "test", right=2, seconds=0.4, strategy="sequential", steps=9.0)
    lay(tmp_path, sequential, "test", right=12, seconds=0.8, beams=4)
    lay(tmp_path, pipelined, "test", right=6, seconds=0.1, dtype="bfloat16")
    sequential, pipelined = (Cell("pubmed", "base", objective) for objective in ("sequential", "pipelined"))
    lay(tmp_path, sequential, "test", right=9, seconds=5.0, metric="rouge")
    lay(tmp_path, pipelined, "test", right=8, seconds=2.0, metric="rouge")
    lay(tmp_path, pipelined, "test", right=7, seconds=1.0, metric="rouge", steps=50.0, printed=True)
    flags = ["--output", str(tmp_path / "out"), "--workdir", str(tmp_path), "--tasks", "msqa,pubmed", "--beams", "4"]
    assert command.main(flags) == 0
    return tmp_path / "out"


def test_table_shows_our_scores_beside_the_papers(collected):
    text = (collected / "tables.md").read_text()
    head = cells_of(text, "Table 2", "data set", "model", "decoder")
    line = cells_of(text, "Table 2", "MSQA", "base", "pipelined", "float32")
    place = {title: i for i, title in enumerate(head) if title != "paper"}
    scores = json.loads((collected / "results.json").read_text())["results"]
    ours = next(r for r in scores if (r["objective"], r["split"], r["dtype"]) == ("pipelined", "test", "float32"))
    # By hand: five documents of two rows are correct, of 54 gold rows and 10 + 15 predicted rows.
    assert ours["em_f1"] == pytest.approx(100 * 2 * 10 / (54 + 25))
    assert line[place["test EM"]] == f"{ours['em_f1']:.1f}" and line[place["test EM"] + 1] == "71.5"
    assert line[place["dev PM"] + 1] == "85.2" and line[place["test PM"] + 1] == "84.3"
    assert line[place["examples/s"]] == "5.00 (2.5x)" and line[place["examples/s"] + 1] == "9.3 (1.7x)"
    assert line[place["documents"]] == "20"
    assert line[place["peak memory"]] == "3 M" and line[place["peak memory"] + 1] == "1,798 M"
    gap = cells_of(text, "Table 2", "", "", "gap")[place["test EM"]]
    assert gap.startswith("-") and " to -" in gap  # half of the correct rows are lost, which is significant
    assert "nothing measured" in text.lower()  # Tables 1, 3 and 5
    assert cells_of(text, "Models", "MSQA", "base", "sequential", "sequential-4-beams")[7] == "1.25"
    assert cells_of(text, "Models", "MSQA", "base", "pipelined", "sequential")[6:8] == ["9.0", "2.50"]
    assert cells_of(text, "Models", "MSQA", "base", "pipelined", "pipelined")[8] == "25.0 %"


def test_a_line_for_each_dtype_and_for_the_bounds_as_printed(collected):
    text = (collected / "tables.md").read_text()
    head = cells_of(text, "Table 2", "data set", "model", "decoder")
    line = dict(zip(head, cells_of(text, "Table 2", "MSQA", "base", "pipelined", "bfloat16"), strict=True))
    # There is no sequential line to compare with; the paper's figures are for float32.
    assert line["examples/s"] == "10.0" and line["paper"] == "–"
    head = cells_of(text, "Table 4", "data set", "model", "decoder")
    line = cells_of(text, "Table 4", "PubMed", "base", "pipelined, as printed (50/20)", "float32")
    place = {title: i for i, title in enumerate(head) if title != "paper"}
    assert line[place["steps"]] == "50.0" and line[place["examples/s"]] == "1.00 (5.0x)"
    assert line[place["examples/s"] + 1] == "1.3 (6.5x)"
    assert cells_of(text, "Table 4", "PubMed", "base", "pipelined", "float32")[place["examples/s"]] == "0.50 (2.5x)"


def test_the_ways_of_a_model():
    names = [way.name for way in ways_of(Cell("pubmed", "base", "pipelined"), DTYPES)]
    assert names == ["pipelined-float32", "pipelined-50x20-float32", "pipelined-bfloat16"]
    printed = Way("pipelined", printed=True)
    assert {"grid.time_max=50", "grid.sub_max=20", "decode.dtype=float32"} < set(printed.settings)
    # A config with the paper's bounds, and a method without bounds.
    for cell in (Cell("msqa", "base", "pipelined"), Cell("pubmed", "base", "sequential")):
        assert ways_of(cell, DTYPES) == [Way(cell.objective), Way(cell.objective, dtype="bfloat16")]


def test_pictures_of_the_figures_are_written_and_linked(collected):
    for name in ("figure_4.png", "figure_5.png"):
        assert (collected / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in (collected / "tables.md").read_text()


def test_reported_numbers_of_the_paper_are_consistent():
    """The paper prints some numbers twice: Table 5 repeats Table 4, and speed-ups are ratios of the printed rates."""
    for task in paper.TABLES[4]:
        assert paper.TABLE_5[task, 1].scores["test"] == paper.REPORTED[task, "base", "pipelined"].scores["test"]
    for (task, size), ratio in paper.SPEED_UPS.items():
        rates = [paper.REPORTED[task, size, s].examples_per_second for s in ("pipelined", "sequential")]
        assert rates[0] / rates[1] == pytest.approx(ratio, abs=0.06)  # both rates are rounded


def test_resumed_run_is_not_read(tmp_path, said):
    cell = Cell("msqa", "base", "sequential")
    lay(tmp_path, cell, "test", right=1, seconds=1.0)
    assert read(cell, tmp_path, "test", Way("sequential")) and not said
    shutil.copytree(tmp_path / cell.name, tmp_path / "elsewhere" / cell.name)
    best(tmp_path / cell.name, 2)
    assert read(cell, tmp_path, "test", Way("sequential")) is None
    assert "evaluates other weights than" in said[0]
    assert read(cell, tmp_path / "elsewhere", "test", Way("sequential"))  # a copy of the run is read


@pytest.mark.long
def test_missing_cells_are_trained_and_evaluated(tmp_path, monkeypatch, said):
    cell = Cell("demo", "scratch", "pipelined", 2)
    config = tmp_path / "demo_scratch.py"
    text = config_lib.to_json(CONFIG)
    config.write_text(f"from pipejax.config import from_json\nconfig = from_json({text!r}, where='test')\n")
    monkeypatch.setattr(Cell, "path", config)
    settings = ["train.steps=2", "train.evaluate_every=2", "train.evaluate_examples=2"]
    options = {"splits": ["test"], "overrides": settings, "limit": 3, "ways": [Way("pipelined")]}
    assert make(cell, tmp_path, **options) == 0
    found = read(cell, tmp_path, "test", Way("pipelined"))
    assert found is not None and found["examples"] == 3
    assert json.loads((tmp_path / cell.name / "config.json").read_text())["grid"]["delay"] == 2
    before = evaluation(tmp_path / cell.name, "test", Way("pipelined")).stat().st_mtime_ns
    assert make(cell, tmp_path, **options) == 0
    assert evaluation(tmp_path / cell.name, "test", Way("pipelined")).stat().st_mtime_ns == before
    assert not fresh(evaluation(tmp_path / cell.name, "test", Way("pipelined")), tmp_path / cell.name, limit=None)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tasks", "msqa,nonsense"], r"--tasks: found 'nonsense'; expected some of msqa, kp20k"),
        (["--sizes", "small"], r"--sizes: found 'small'; expected some of base, large, scratch"),
        (["--splits", "train"], r"--splits: found 'train'; expected some of dev, test"),
        (["--delays", "4", "--run"], r"--delays: found '4'; expected some of 2, 3"),
        (["--dtypes", "float16"], r"--dtypes: found 'float16'; expected some of float32, bfloat16"),
        (["--beams", "0"], r"--beams: found 0; expected at least 1"),
        (["--limit", "0", "--run"], r"--limit: found 0; expected at least 1"),
        (["--tasks", "pubmed", "--sizes", "scratch"], r"--sizes scratch: found no config of pubmed"),
        (["--run", "--set", "train.nonsense=1"], r"train\.nonsense: unknown key"),
    ],
)
def test_invalid_flags_are_refused(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        command.main(["--output", str(tmp_path / "out"), "--workdir", str(tmp_path), *flags])


def test_predictions_of_other_documents_are_refused(tmp_path):
    sequential, pipelined = (Cell("msqa", "base", objective) for objective in ("sequential", "pipelined"))
    for cell in (sequential, pipelined):
        lay(tmp_path, cell, "test", right=3, seconds=1.0)
    path = evaluation(tmp_path / pipelined.name, "test", Way("pipelined")).with_suffix(".jsonl")
    path.write_text(path.read_text().replace('"id": "0"', '"id": "other"'))
    with pytest.raises(UserError, match="found other documents than in"):
        command.main(["--output", str(tmp_path / "out"), "--workdir", str(tmp_path), "--tasks", "msqa"])
    evaluation(tmp_path / pipelined.name, "test", Way("pipelined")).write_text("{}")
    with pytest.raises(UserError, match=r"not a file of `python -m pipejax evaluate --json`"):
        command.main(["--output", str(tmp_path / "out"), "--workdir", str(tmp_path), "--tasks", "msqa"])


def test_effects_of_bounds_are_counted(tmp_path, tokenizer_files, monkeypatch, capsys):
    """Two hand-made answers: one of 3 rows, one of them longer than 50 steps, and one of 21 rows."""
    file = tmp_path / "msqa.jsonl"
    answers = [["the cat", "the dog " * 60, "the end"], ["the cat"] * 21]
    lines = [{"id": str(i), "source": "the cat", "targets": rows} for i, rows in enumerate(answers)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "t5_tokenizer").symlink_to(tokenizer_files)
    tokenizer = Tokenizer.load(tokenizer_files)
    lengths = [[len(tokenizer.encode(row)) for row in rows] for rows in answers]
    assert lengths[0][1] > 100 and lengths[1][0] < 30
    kept = [[min(length, 50 - i) for i, length in enumerate(rows[:20])] for rows in lengths]
    monkeypatch.setenv("PIPEJAX_DATA", str(tmp_path))
    monkeypatch.setattr(bounds, "FILES", {"pubmed": ("both", "msqa.jsonl")})
    assert bounds.main(["--json", str(tmp_path / "out.json")]) == 0
    own, printed = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (own["time_max"], printed["time_max"], printed["cut"], printed["answers"]) == (256, 50, 100.0, 2)
    assert printed["kept"] == pytest.approx(100 * sum(map(sum, kept)) / sum(map(sum, lengths)))
    steps = [50, max(i + length + 1 for i, length in enumerate(lengths[1][:20]))]
    assert printed["bounded_ratio"] == pytest.approx((sum(map(sum, lengths)) + 2) / sum(steps))  # " " separates no rows
    assert printed["kept_ratio"] == pytest.approx((sum(map(sum, kept)) + 2) / sum(steps))
    assert f"| as printed (50/20) | 100.0 | {printed['kept']:.1f} |" in capsys.readouterr().out
    flags = ["--output", str(tmp_path / "tables"), "--workdir", str(tmp_path), "--tasks", "pubmed"]
    settings = ["data.task=jsonl", f"data.test={file}", f"data.train={file}", f"data.tokenizer={tokenizer_files}"]
    assert command.main([*flags, *(flag for setting in settings for flag in ("--set", setting))]) == 0
    assert f"as printed (50/20) | 100.0 | {printed['kept']:.1f} |" in (tmp_path / "tables" / "tables.md").read_text()
    monkeypatch.setenv("PIPEJAX_DATA", str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"PIPEJAX_DATA: found .*absent'; expected the directory of the data sets"):
        bounds.main([])
