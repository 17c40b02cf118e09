"""The tables of the page of results: every file has a table with its command."""

import json

import pytest
import results

from lab.benchmarks import cards


@pytest.mark.parametrize("name", sorted(path.name for path in results.DIRECTORY.glob("*.json") if path.stem != "gpu"))
def test_every_file_has_a_table(name: str) -> None:
    head, rule, *rows = results.page(name).splitlines()
    table = [row for row in rows if row.startswith("| ")]
    assert len(table) > 1 and {row.count("|") for row in (head, rule, *table)} == {head.count("|")}
    assert name == "drafts.json" or "python -m lab." in rows[-2]


def test_table_has_times_relative_to_the_first_system() -> None:
    """The factor of the first system is one for each answer."""
    found = [("8x14", "hf", 2.0, 1.0), ("8x14", "other", 5.0, 1.0), ("5x4", "hf", 4.0, 0.5)]
    given = [{"pattern": p, "system": s, "steps": 7, "decode_s": d, "encode_s": e} for p, s, d, e in found]
    assert [row.split(" | ")[-2:] for row in results.decoding(given)[2:5]] == [
        ["1.00", "1.00 |"],
        ["2.50", "2.00 |"],
        ["1.00", "1.00 |"],
    ]


def test_table_has_the_peak_memory() -> None:
    """Weights take 5 and 7 MiB, the encoded source 2, the first cache 1, and the second cache 4."""
    plans = {
        "encode, batch 1": (5, 2, 3, 0),
        "sequential, batch 1, 448 slots": (7 + 2, 1, 6, 0),
        "sequential, batch 1, 513 slots": (7 + 2 + 1, 4, 1, 1),
    }
    given = [
        {"model": "base", "dtype": "float32", "program": name}
        | {"memory": {part: n * 2**20 for part, n in zip(("argument", "output", "temp", "alias"), plan, strict=True)}}
        for name, plan in plans.items()
    ]
    (line,) = results.memory(given)[2:]
    assert line == "| base | float32 | sequential | 12 | 17 | 21 | 1,534 to 1,802 |"


@pytest.mark.slow
def test_choices_of_remat_are_current() -> None:
    """The file has the present estimates of `pipejax plan`."""
    kept = json.loads((results.DIRECTORY / "remat.json").read_text(encoding="utf-8"))["results"]
    now = [row for name, training in cards.STEPS.items() for row in cards.rows(name, training)]
    assert [row | {"gib": pytest.approx(row["gib"])} for row in now] == kept
    smallest = {row["step"]: row for row in reversed(kept)}["Base, 24 sources of 2,048 at once"]
    assert (smallest["remat"], smallest["gib"]["dots"] > 0.75 * smallest["jax_gib"]) == ("layers", True)


def test_the_table_of_training_steps() -> None:
    """The cell of a kernel is empty for a tree without this kernel."""
    attention = {"attention": "encoder", "kernel": "_attend", "by_loop": [44.7], "registers": 9, "spilled_bytes": 0}
    kinds = {"product": {"starts": 5, "bytes": 3e9}, "custom call __gpu$xla.gpu.triton": {"starts": 2, "bytes": 7e9}}
    old = {"target": "h100", "tree": "old", "starts": 15233, "small_starts": 4180, "moved": 362e9, "kinds": kinds}
    old |= {"memory": {"temp": 2**31}, "attention": [attention | {"kernel": "_backward_buckets"}]}
    new = old | {"tree": ".", "starts": 10, "attention": [attention | {"by_loop": [28.1, 42.5], "spilled_bytes": 4}]}
    lines = results.training_steps([old, new])
    assert lines[0] == "|  | h100, old | h100, now |"
    for line in (
        "| kernels started | 15,233 | 10 |",
        "| of which attention in blocks | 7 | 7 |",
        "| instructions a score, encoder, attend |  | 28.1 and 42.5 |",
        "| instructions a score, encoder, backward buckets | 44.7 |  |",
        "| bytes of spilled registers | 0 | 4 |",
    ):
        assert line in lines
