"""The dependency probes: tasks follow their rules, and the command works, without long training."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.experiments import probe_data, probes
from lab.experiments.probe_data import KINDS, Kind, examples, marks, rows, whole
from pipejax import config, grid
from pipejax.system.errors import UserError

BY_NAME = {kind.name: kind for kind in KINDS}
ITEMS = [("c", (1, 0, 1, 1)), ("a", (1, 2, 1, 1)), ("b", (0, 2, 2, 1))]


# The tasks.


@pytest.mark.parametrize(
    "name, expected",
    [
        ("independent", ["a 1 0 1 2", "b 0 2 1 2", "c 1 1 2 0"]),
        ("sorted", ["a 1 0 1 2", "b 0 2 1 2", "c 1 1 2 0"]),
        # 1, then 1 + 0, then 1 + 1
        ("running_total", ["a 1 0 1 2", "b 1 0 2 0", "c 2 2 0 1"]),
        ("copy_second", ["a 1 0 1 2", "b 0 2 1 2", "c 2 2 0 1"]),
        ("copy_end", ["a 1 0 1 2", "b 2 1 0 1", "c 1 1 2 0"]),
    ],
)
def test_rows_of_each_probe_equal_hand_made_rows(name: str, expected: list[str]) -> None:
    assert rows(BY_NAME[name], ITEMS, random.Random(0)) == expected


def test_no_repeats_is_independent_in_every_order() -> None:
    order = random.Random(0)
    seen = {tuple(rows(BY_NAME["no_repeats"], ITEMS, order)) for _ in range(100)}
    assert len(seen) == 6
    assert {tuple(sorted(found)) for found in seen} == {tuple(sorted(rows(BY_NAME["independent"], ITEMS, order)))}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_example_follows_its_rule(kind: Kind) -> None:
    for example in examples(kind, "train", 200):
        items: dict[str, list[int]] = {}
        for letter, digit, column in map(list, example.source.split()):
            items.setdefault(letter, []).append(int(digit))
            assert column == "wxyz"[len(items[letter]) - 1]
        letters = [row.split()[0] for row in example.targets]
        totals = [[int(total) for total in row.split()[1:]] for row in example.targets]
        assert all(len(found) == 4 and set(found) <= {0, 1, 2} for found in totals)
        allowed = {"fixed": list("abc"[: len(items)]), "sorted": sorted(items), "random": letters}
        assert letters == allowed[kind.order] and sorted(letters) == sorted(items) and len(letters) in (2, 3)
        for i, letter in enumerate(letters):
            for j in range(1, 4):
                assert (totals[i][j] - totals[i][j - 1] - items[letter][j]) % 3 == 0
            first, own = totals[i][0], items[letter][0]
            above = totals[i - 1] if i else None
            assert (
                first
                == {
                    "independent": own,
                    "sorted": own,
                    "no_repeats": own,
                    "running_total": (above[0] + own) % 3 if above else own,
                    "copy_second": above[1] if above else own,
                    "copy_end": above[3] if above else own,
                }[kind.name]
            )


def test_kinds_of_an_order_share_their_sources() -> None:
    fixed = {tuple(e.source for e in examples(kind, "train", 500)) for kind in KINDS if kind.order == "fixed"}
    free = {tuple(e.source for e in examples(kind, "train", 500)) for kind in KINDS if kind.order != "fixed"}
    assert len(fixed) == len(free) == 1
    assert {word[0] for source in fixed.pop() for word in source.split()} == set("abc")
    assert {word[0] for source in free.pop() for word in source.split()} == set("abcd")


def test_splits_share_no_source() -> None:
    for kind in (BY_NAME["independent"], BY_NAME["sorted"]):
        train = [e.source for e in examples(kind, "train", probes.EXAMPLES["train"])]
        test = [e.source for e in examples(kind, "test", probes.EXAMPLES["test"])]
        assert not set(train) & set(test)
        # The split does not change the distribution of sources.
        two = [sum(len(source.split()) == 8 for source in split) / len(split) for split in (train, test)]
        assert two == pytest.approx([0.5, 0.5], abs=0.1)
    # The examples are equal on every machine, so that results of two machines can be combined.
    assert test[0] == "d0w d1x d0y d0z b0w b2x b1y b0z c0w c1x c1y c1z"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_least_sufficient_delay_follows_from_the_grid(kind: Kind) -> None:
    """Checks the tokens that a row sees when its first total is generated, by the mask of `pipejax.grid`."""

    def suffices(delay: int) -> bool:
        query = grid.start(1, delay) + 1  # feeds the letter, which is the row's first token
        # The letter of this row follows from the letter of the row above.
        needed = [grid.start(0, delay) + 1] if kind.order != "fixed" else []
        if needed and not grid.visible(1, grid.start(1, delay), 0, needed[0]):
            return False
        carried = grid.start(0, delay) + 1 + kind.carry
        return not kind.carry or bool(grid.visible(1, query, 0, carried))

    assert min(delay for delay in range(1, 9) if suffices(delay)) == kind.delay
    assert all(suffices(delay) for delay in range(kind.delay, 9))


def test_marks_of_correct_rows() -> None:
    ordered, free = BY_NAME["sorted"], BY_NAME["no_repeats"]
    gold = ["a 1", "b 2", "c 3"]
    assert marks(ordered, gold, gold) == [True, True, True]
    assert marks(ordered, gold, ["b 2", "a 1", "c 3"]) == [False, False, True]
    assert marks(ordered, gold, ["a 1"]) == [True, False, False]
    assert marks(ordered, gold, []) == [False, False, False]
    assert marks(free, gold, ["b 2", "a 1", "c 3"]) == [True, True, True]
    assert marks(free, gold, ["b 2", "b 2", "a 1", "c 3"]) == [True, False, True]
    assert marks(free, gold, ["b 2", "d 4"]) == [True, False, False]
    assert whole(ordered, gold, gold) and whole(free, gold, ["c 3", "a 1", "b 2"])
    assert not whole(ordered, gold, [*gold, "a 1"]) and not whole(free, gold, [*gold, "a 1"])
    assert not whole(ordered, gold, gold[:2])


# The command.

KINDS_ARGUMENT = ["--kinds", "copy_end,no_repeats", "--delays", "2,1", "--seeds", "2"]


def canned(monkeypatch, answers: Any = None) -> list[str]:
    """Replaces training and decoding by correct rows, changed by `answers`; returns the names of trained runs."""
    trained: list[str] = []

    def fit(config, directory: Path) -> int:
        trained.append(directory.name)
        directory.mkdir(parents=True)
        return 0

    def evaluate(generator, test: Sequence[Any], *, batch_size: int):
        change = answers or (lambda name, row: row)
        records = [{"rows": [change(generator.name, row) for row in e.targets]} for e in test]
        return {"examples": len(test), "steps": 8.0, "truncated": {}}, records

    def open_run(directory: Path):
        return type("Generator", (), {"name": directory.name, "config": probes.CONFIG})

    monkeypatch.setattr(probes, "fit", fit)
    monkeypatch.setattr(probes, "open_run", open_run)
    monkeypatch.setattr(probes, "evaluate", evaluate)
    monkeypatch.setattr(probes, "EXAMPLES", {"train": 20, "test": 30})
    return trained


def test_the_whole_grid_and_its_table(tmp_path, monkeypatch, capsys) -> None:
    def wrong_first_digit(name: str, row: str) -> str:
        return re.sub(r"\d", "9", row, count=1) if name == "copy_end-delay1-seed1" else row

    trained = canned(monkeypatch, wrong_first_digit)
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    arguments = [*KINDS_ARGUMENT, "--workdir", str(tmp_path / "runs"), "--json", str(out), "--png", str(png)]
    assert probes.main(arguments) == 0
    decoders = ("sequential", "delay1", "delay2")
    assert trained == [
        f"{kind}-{decoder}-seed{seed}" for seed in (0, 1) for kind in ("no_repeats", "copy_end") for decoder in decoders
    ]
    table = capsys.readouterr().out
    right = "100.0 (100.0 to 100.0)"
    assert table.splitlines()[2:6] == [
        "| kind | tokens that a row needs from the rows above | least sufficient Δt | sequential | Δt = 1 | Δt = 2 |",
        "|---|---|---|---|---|---|",
        f"| no_repeats | all letters, to take another | 1 | {right} | {right} | {right} |",
        f"| copy_end | the last total, as its first | 4 | {right} | *50.0* (0.0 to 100.0) | *100.0* (100.0 to 100.0) |",
    ]
    assert table.count("copy_end") == 2  # rows below the first, and whole answers
    assert "sequential 8.0, Δt = 1 8.0, Δt = 2 8.0" in table
    written = json.loads(out.read_text())
    cells = written["cells"]
    assert len(cells) == 12 and written["config"]["model.d_model"] == 64 and "train.seed" not in written["config"]
    wrong = [cell for cell in cells if cell["rows"] < 100]
    assert [(cell["cell"], cell["rows"], cell["documents"]) for cell in wrong] == [("copy_end-delay1-seed1", 0, 0)]
    assert png.read_bytes().startswith(b"\x89PNG")

    # A repetition trains nothing and gives the same results. A missing result is trained again.
    trained.clear()
    assert probes.main(arguments) == 0
    assert trained == [] and capsys.readouterr().out == table
    (tmp_path / "runs" / "no_repeats-delay2-seed1" / "result.json").unlink()
    (tmp_path / "runs" / "no_repeats-delay2-seed1").rmdir()
    assert probes.main(arguments) == 0
    assert trained == ["no_repeats-delay2-seed1"]


def test_results_of_other_settings_are_refused(tmp_path, monkeypatch) -> None:
    canned(monkeypatch)
    arguments = ["--kinds", "sorted", "--delays", "1", "--seeds", "1", "--workdir", str(tmp_path)]
    assert probes.main(arguments) == 0
    with pytest.raises(
        UserError, match=r"sorted-sequential-seed0/result\.json: train\.steps: \d+ -> 7; expected the settings"
    ):
        probes.main([*arguments, "--set", "train.steps=7"])
    monkeypatch.setattr(probes, "EXAMPLES", {"train": 21, "test": 30})
    with pytest.raises(UserError, match=r"result\.json: data: '\w+' -> '\w+'"):
        probes.main(arguments)
    (tmp_path / "sorted-sequential-seed0" / "result.json").write_text("{}")
    with pytest.raises(UserError, match=r"result\.json: no result of this command"):
        probes.main(arguments)


def test_interrupted_run_resumes_without_repeating_finished_trainings(tmp_path, monkeypatch, capsys) -> None:
    trained = canned(monkeypatch)
    finish: Any = vars(probes)["fit"]
    arguments = ["--kinds", "sorted", "--delays", "1,2", "--seeds", "1", "--workdir", str(tmp_path)]
    stops = iter([0, 143])
    monkeypatch.setattr(probes, "fit", lambda *given, **rest: next(stops) or finish(*given, **rest))
    with pytest.raises(SystemExit, match="143"):
        probes.main(arguments)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(probes, "fit", finish)
    assert probes.main(arguments) == 0
    assert trained == ["sorted-sequential-seed0", "sorted-delay1-seed0", "sorted-delay2-seed0"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--kinds", "sorted,sordid"], "--kinds: found 'sordid'; expected some of independent, sorted, "),
        (["--delays", "1,0"], "--delays: found '1,0'; expected whole numbers from 1 to 16"),
        (["--delays", "one"], "--delays: found 'one'"),
        (["--seeds", "0"], "--seeds: found 0; expected at least 1"),
        (["--json", "absent/out.json"], "--json absent/out.json: found no directory "),
        (["--png", "out.jpeg2"], "--png: found out.jpeg2; expected a name that ends in .png, .svg or .pdf"),
        (["--set", "train.step=3"], "train.step: unknown key (did you mean train.steps?)"),
    ],
)
def test_invalid_flags_are_refused_before_training(tmp_path, monkeypatch, arguments, message) -> None:
    trained = canned(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        probes.main([*arguments, "--workdir", "runs"])
    assert str(error.value).startswith(message)
    assert trained == [] and not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_few_steps_of_real_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(probes, "EXAMPLES", {"train": 64, "test": 8})
    sizes = ("d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers")
    small = [f"model.{size}=1" for size in sizes]
    short = ["train.steps=1", "train.pack=1", "decode.batch_size=4", "grid.time_max=4"]
    base = config.override(probes.CONFIG, [*small, *short])
    cell = probes.Cell(BY_NAME["copy_end"], 2, 1)
    (result,) = probes.run_all([cell], base, tmp_path)
    assert result["examples"] == 8 and result["truncated"] == {"time_max": 8}
    used = json.loads((tmp_path / "copy_end-delay2-seed1" / "config.json").read_text())
    assert (used["grid"]["delay"], used["train"]["method"], used["train"]["seed"]) == (2, "pipelined", 1)
    assert used["train"]["steps"] == 3  # this kind takes three steps for one
    assert list(probes.run_all([cell], base, tmp_path)) == [result]
    # An untrained decoder has no correct row; the tests above check that correct rows count as correct.
    assert result["rows"] == 0 and len(result["rows_by_place"]) == 3


def test_the_vocabulary_holds_every_word(tmp_path) -> None:
    words = {
        w
        for kind in KINDS
        for e in examples(kind, "test", 200)
        for w in [*e.source.split(), *" ".join(e.targets).split()]
    }
    assert words <= set(probe_data.WORDS)
    model = probes.CONFIG.model
    assert model is not None and len(probe_data.WORDS) + 4 <= model.vocab_size  # pad, eos, unk and the separator
