"""The letters of the experiment with named rows, and the steps that it counts."""

from lab.experiments import named_rows as experiment
from pipejax.data.examples import Example


def test_rows_equal_the_fields_of_the_letter():
    letters, seen = experiment.examples("test"), set()
    for letter in letters:
        said = dict(
            clause.split(" is ") for clause in letter.source.removesuffix(" .").removeprefix("the ").split(" . the ")
        )
        rows = dict(row.split(": ") for row in letter.targets)
        assert [f"{field}:" for field in rows] == list(experiment.NAMES)
        assert {field: value for field, value in rows.items() if value != experiment.NONE} == said
        seen.add(tuple(said))
    assert len(seen) > 900, "in any order"
    words = [word for lists in experiment.FIELDS.values() for words in lists for word in words.split()]
    assert len(words) == len(set(words))
    assert not {letter.source for letter in letters} & {letter.source for letter in experiment.examples("train")}


def test_well_formed_record_has_all_rows_in_order():
    rows = [f"{name} x" for name in experiment.NAMES]
    assert experiment.well_formed({"rows": rows, "truncated": None})
    for record in ({"rows": rows, "truncated": "time_max"}, {"rows": rows[:9], "truncated": None}):
        assert not experiment.well_formed(record)
    assert not experiment.well_formed({"rows": [rows[1], rows[0], *rows[2:]], "truncated": None})


def test_steps_of_other_rules_equal_hand_computed_steps():
    """Rows of 3, 2 and 4 words, the first of which is the name."""
    found = experiment.simulated([Example("", "", ("a: b c", "d: e", "f: g h i"))])
    fixed = {"delay 0": 5, "delay 1": 2 + 5, "delay 2": 4 + 5, "delay 4": 8 + 5, "sequential": 3 + 2 + 4 + 2 + 1}
    waiting = {"after the name above": 7, "after the first word above": 9, "after the row above": 3 + 2 + 5}
    assert found == fixed | waiting
