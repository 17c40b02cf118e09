"""The tables of the page of results: every file has one, with the command."""

import pytest
import results


@pytest.mark.parametrize("name", sorted(path.name for path in results.DIRECTORY.glob("*.json") if path.stem != "gpu"))
def test_every_file_has_a_table(name: str) -> None:
    head, rule, *rows = results.page(name).splitlines()
    table = [row for row in rows if row.startswith("| ")]
    assert len(table) > 1 and {row.count("|") for row in (head, rule, *table)} == {head.count("|")}
    assert name == "drafts.json" or "python -m lab." in rows[-2]


def test_how_many_times_as_long() -> None:
    """Of each answer the first system counts as one."""
    found = [("8x14", "hf", 2.0, 1.0), ("8x14", "other", 5.0, 1.0), ("5x4", "hf", 4.0, 0.5)]
    given = [{"pattern": p, "system": s, "steps": 7, "decode_s": d, "encode_s": e} for p, s, d, e in found]
    assert [row.split(" | ")[-2:] for row in results.decoding(given)[2:5]] == [
        ["1.00", "1.00 |"],
        ["2.50", "2.00 |"],
        ["1.00", "1.00 |"],
    ]


def test_the_most_memory_at_once() -> None:
    """Weights of 5 and 7 MiB; the encoded source takes 2, the first cache 1, the second 4."""
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
