"""`make demo`: decoders take turns and are compared by medians; the larger model does the requested work."""

from collections.abc import Sequence
from typing import Any

import pytest

from lab import demo
from lab.benchmarks.systems import SIZES
from pipejax.data.examples import Example


def test_decoders_take_turns_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents; the machine is ten times slower in the second round, and once a hundred times for a document."""
    turns: list[str] = []
    tick = {"pipelined": 1.0, "sequential": 3.0}

    def evaluate(name: str, examples: Sequence[Example], **options: Any) -> Any:
        turns.append(name)
        slow = 10.0 if len(turns) in (3, 4) else 1.0
        seconds = [tick[name] * slow * length for length in (1, 2, 3)]
        seconds[2] *= 100.0 if len(turns) == 1 else 1.0
        assert options["batch_size"] == 1
        return {"examples": 3, "steps": 1.0}, [{"seconds": s, "turn": len(turns)} for s in seconds]

    monkeypatch.setattr(demo, "evaluate", evaluate)
    generators: Any = {"pipelined": "pipelined", "sequential": "sequential"}
    results, records = demo.compare(generators, [Example(str(i), "", ()) for i in range(3)])
    assert demo.ROUNDS == 5
    assert turns == ["pipelined", "sequential", "sequential", "pipelined"] * 2 + ["pipelined", "sequential"]
    assert {name: r["speed_up"] for name, r in results.items()} == {"pipelined": 3.0, "sequential": 1.0}
    assert {name: r["milliseconds"] for name, r in results.items()} == {"pipelined": 2000.0, "sequential": 6000.0}
    assert {r["spread"] for r in results.values()} == {0.0}  # all rounds except one are equally fast
    assert [record["turn"] for record in records["pipelined"]] == [9, 9, 9]  # type: ignore[typeddict-item]


def test_table_has_both_ratios() -> None:
    both: dict[str, Any] = {
        "sequential": {"examples": 512, "em_f1": 99.0, "steps": 50.0, "milliseconds": 8.0, "speed_up": 1.0},
        "pipelined": {"em_f1": 98.5, "steps": 12.5, "step_ratio": 4.1, "milliseconds": 4.0, "speed_up": 2.05},
    }
    lines = demo.table(both).splitlines()
    sequential, pipelined = (next(line for line in lines if line.startswith(name)) for name in both)
    assert sequential.split() == ["sequential", "99.00", "50.00", "1.00", "8.00", "1.00x"]
    assert pipelined.split() == ["pipelined", "98.50", "12.50", "4.00", "4.00", "2.05x"]
    assert "predict a step ratio of 4.10" in lines[-1]


@pytest.mark.slow
def test_the_larger_model_takes_the_steps_of_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    timed = demo.at_size(SIZES["tiny"], {"3 rows of 4 tokens": [4] * 3, "one of 2": [2]}, source=20, rounds=1)
    steps = [(line["sequential"]["steps"], line["pipelined"]["steps"]) for line in timed]
    assert steps == [(3 * (4 + 1), 3 + 4), (2 + 1, 1 + 2)]
    for line in timed:
        for name in ("sequential", "pipelined"):
            assert 0 < line[name]["decode_seconds"] < line[name]["seconds"]
        assert line["speed_up"] > 0 < line["decode_speed_up"]
        assert line["spread"] >= 0
    lines = capsys.readouterr().err.splitlines()  # a line before each wait
    for wait in ("preparing random weights", "compiling the sequential decoder", "compiling the pipelined decoder"):
        assert sum(wait in line for line in lines) == 1
    text = demo.size_table(timed)
    assert "source of 20 tokens" in text and "3 rows of 4 tokens" in text and "15 -> 7" in text


@pytest.mark.parametrize(
    ("load", "spread", "signs"),
    [
        (0.4, 0.02, None),
        (3.0, 0.02, None),  # the demo itself may keep both processors busy
        (None, 0.02, None),  # a system without a load average
        (8.0, 0.02, "a load of 8.0 on 2 processors"),
        (0.4, 0.31, "rounds that differ by 31 %"),
        (None, 0.31, "rounds that differ by 31 %"),
        (8.0, 0.31, "a load of 8.0 on 2 processors and rounds that differ by 31 %"),
    ],
)
def test_a_busy_machine_is_reported(
    monkeypatch: pytest.MonkeyPatch, load: float | None, spread: float, signs: str | None
) -> None:
    notes: list[str] = []
    monkeypatch.setattr("pipejax.system.cli.note", notes.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    demo.warn_of_other_work(load, spread)
    expected = f"warning: found {signs}: other work distorts the times and the speed-up"
    assert notes == ([expected] if signs else [])


def test_the_spread_leaves_out_one_slow_round() -> None:
    assert demo.spread([2.0, 2.0, 9.0, 2.0, 2.0]) == 0.0
    assert demo.spread([2.0, 3.0, 9.0, 2.0, 2.0]) == 0.5
    assert demo.spread([2.0, 3.0]) == 0.5
    assert demo.spread([2.0]) == 0.0


def test_load_of_others_is_none_if_the_system_has_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise OSError

    monkeypatch.setattr("os.getloadavg", absent)
    assert demo.load_of_others() is None
