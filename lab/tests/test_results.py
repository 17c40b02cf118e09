"""The tables of the page of results: every file has one, with the machine and the command."""

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
