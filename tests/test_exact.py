"""The exact metric for custom data: differences that count and differences that do not, and values by type."""

import json
from collections import Counter
from typing import Any

import pytest

from pipejax import metrics
from pipejax.apps.scoring import metrics_command as command
from pipejax.config.row_names import split_row
from pipejax.metrics.exact import fold, named_rows, number_or_text


def f1(gold: Any, predicted: Any, name: str = "exact") -> float:
    return metrics.score(name, [""], [gold], [predicted])["em_f1"]


@pytest.mark.parametrize(
    "left, right",
    [
        # MultiSpanQA's rule calls all of them equal, except those in the last three lines
        *[("1.5", "15"), ("-5", "5"), ("C++", "C#"), ("+", "-"), ("1/12", "11/2"), ("A", "the"), ("3 %", "3")],
        *[("$5", "5"), ("x_1", "x1"), ("a[i]", "ai"), ("f(x)", "fx"), ("<= 3", "3"), ("12:30", "1230"), ("a.m.", "am")],
        *[("The Who", "Who"), ("mW", "MW"), ("!x", "x"), (".NET", "NET"), ("1,5", "15"), ("re-sign", "resign")],
        *[("10²", "102"), ("1½", "11⁄2"), ("10⁻²", "10−2"), ("2₂", "22"), ("1①", "11")],
        *[("5 °C", "5 K"), ("α", "β"), ("猫", "狗"), ("5 µg", "5 mg"), ("é", "e")],
        *[("1", "1.0"), ("true", "True"), ("01", "1")],
    ],
)
def test_different_rows_are_not_equal(left: str, right: str) -> None:
    assert f1([left], [right]) == f1([right], [left]) == 0
    assert f1([left], [left]) == f1([right], [right]) == 100
    assert 0 < metrics.score("exact", [""], [[f"same {left}"]], [[f"same {right}"]])["pm_f1"] < 100


@pytest.mark.parametrize(
    "left, right",
    [
        *[("a  b", "a b"), (" a\tb\n", "a b"), ("a\u00a0b", "a b"), ("a\u3000b", "a b")],
        *[
            ("ﬁx", "fix"),
            ("１２", "12"),
            ("5－3", "5-3"),
            ("e\u0301", "é"),
            ("5 ㎏", "5 kg"),
            ("m²", "m2"),
            ("ＡＢ", "AB"),
        ],
        *[("5 µg", "5 μg"), ("…", "..."), ("ｶﾞ", "ガ")],
    ],
)
def test_rows_with_the_same_text_are_equal(left: str, right: str) -> None:
    assert f1([left], [right]) == f1([right], [left]) == 100


def test_case_counts_except_in_exact_caseless() -> None:
    for left, right in (("MW", "mW"), ("Straße", "STRASSE"), ("ΣΑΣ", "σας"), ("Ａ", "a")):
        assert f1([left], [right]) == 0
        assert f1([left], [right], "exact_caseless") == 100
    assert f1(["1.5 mW"], ["15 MW"], "exact_caseless") == 0


def test_repeated_rows_count_each_time() -> None:
    scores = metrics.score("exact", [""], [["a", "a", "b"]], [["a", "b", "b", "c"]])
    right = (Counter("aab") & Counter("abbc")).total()
    assert right == 2
    assert scores["em_precision"] == pytest.approx(100 * right / 4)
    assert scores["em_recall"] == pytest.approx(100 * right / 3)
    assert f1(["a", "b"], ["b", "a"]) == 100  # in any order
    assert f1(["a", "a"], ["a"]) == pytest.approx(200 / 3) and f1(["a", "a"], ["a", "a"]) == 100
    assert f1([], [""]) == f1([" "], []) == 100 and f1([], ["a"]) == 0  # a blank row does not count


@pytest.mark.parametrize(
    "left, right, equal",
    [
        *[(1, 1.0, True), (0, -0.0, True), (1e20, 10**20, True), (2**53, 2**53 + 1, False), (0.1, 0.10000001, False)],
        *[(1, True, False), (0, False, False), (1, "1", False), (None, "null", False), (None, False, False)],
        *[("1", "1.0", False), ("a  b", "a b", True), ("a", "A", False), ([1, "x"], [1.0, "x"], True)],
        *[([1, 2], [2, 1], False), ([1], 1, False), ("2024-05-03", "2024-05-3", False), (1e300, 1e299, False)],
        *[
            ({"x": 1, "y": "ａ"}, {"y": "a", "x": 1.0}, True),
            ({"x": 1}, {"x": True}, False),
            ({"x": 1}, {"z": 1}, False),
        ],
    ],
)
def test_values_of_objects_by_type(tmp_path, capsys, left: object, right: object, equal: bool) -> None:
    assert f1({"x": left, "y": 2}, {"y": 2.0, "x": right}) == (100 if equal else 50)
    assert f1({"x": left}, {"z": left}) == 0
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps({"gold": {"x": left}, "pred": {"x": right}}) + "\n")
    assert command.main(["exact", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["em_f1"] == (100 if equal else 0)


@pytest.mark.parametrize(
    "left, right, equal",
    [
        *[("price: 1", "price: 1.0", True), ("price: 1e3", "price:1000", True), ("price: １", "price: 1", True)],
        *[("price: 1", "price: 2", False), ("price: -1", "price: 1", False), ("price: 1", "price net: 1", False)],
        *[
            ("price: 01", "price: 1", False),
            ("price: 1 kg", "price: 1.0 kg", False),
            ("price: 1,0", "price: 10", False),
        ],
        *[("price: 0.1000000000000000000001", "price: 0.1", False), ("other: 1", "other: 1.0", False)],
        *[("price: NaN", "price: nan", False), ("price: Infinity", "price: inf", False), ("price: ", "price:", True)],
        ("price: 1e999999999", "price: 10e999999998", True),
    ],
)
def test_values_of_named_rows_by_type(tmp_path, capsys, left: str, right: str, equal: bool) -> None:
    path = tmp_path / "f.jsonl"
    line = {"gold": ["date: 3", left], "pred": ["date: 3", right], "row_names": ["price:", "price net:", "date:"]}
    path.write_text(json.dumps(line) + "\n")
    assert command.main(["exact", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["em_f1"] == (100 if equal else 50)


def test_a_longer_name_comes_first() -> None:
    readers = dict.fromkeys(("price", "price net"), number_or_text)
    assert named_rows(["price net 2", "price 3", "cost 4"], readers) == [("price net", 2), ("price", 3), "cost 4"]


def test_a_value_that_breaks_its_schema_is_text() -> None:
    assert named_rows(["a: x", "b: y"], {"a:": json.loads, "b:": {"z": 1}.__getitem__}) == [("a:", "x"), ("b:", "y")]


def test_folding_is_idempotent() -> None:
    for text in ("10²³", " ①２½ ", "ﬁ\u00a0x"):
        assert fold(fold(text)) == fold(text)


# Names with and without a mark, and rows beside objects.


def scored(tmp_path: Any, capsys: Any, *, metric: str = "exact", **line: Any) -> float:
    """The F1 of a file with one line, by the command."""
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert command.main([metric, str(path)]) == 0
    return json.loads(capsys.readouterr().out)["em_f1"]


@pytest.mark.parametrize("name", ["price", "price:", "price =", "price -", "price: "])
@pytest.mark.parametrize(
    "left, right, equal",
    [
        *[("price: 1.50", "price: 1.5", True), ("price:1.50", "price: 1.5", True), ("price = 1", "price= 1.0", True)],
        *[("price: -1", "price: 1", False), ("price: -1.0", "price: -1", True), ("prices: 1.0", "prices: 1", False)],
        *[("price: 1.50", "price: 1.51", False), ("price:", "price: ", True), ("price:: 1", "price: 1", False)],
    ],
)
def test_mark_after_name_is_ignored(tmp_path, capsys, name: str, left: str, right: str, equal: bool) -> None:
    if "=" not in left or name == "price" or "=" in name:
        found = scored(tmp_path, capsys, gold=[left], pred=[right], row_names=[name])
        assert found == (100 if equal else 0)


@pytest.mark.parametrize(
    "name, row, expected",
    [
        *[("price", "price 1.50", ("price", "1.50")), ("price", "price -1", ("price", "-1")), ("a", "b: 1", None)],
        *[
            ("price", "price - 1", ("price", "1")),
            ("price", "price", ("price", "")),
            ("face", "face :)", ("face", ":)")),
        ],
        *[("price:", "price = 1", ("price:", "1")), ("price:", "price 1", None), ("=", "= 1", ("=", "1"))],
        *[("价格", "价格一百", ("价格", "一百")), ("no", "not: 1", None), ("No", "No1", ("No", "1"))],
    ],
)
def test_text_after_a_name_is_the_value(name: str, row: str, expected: tuple[str, str] | None) -> None:
    assert split_row(row, [name]) == expected


@pytest.mark.parametrize("left, right", [("Price: 1.50", "price: 1.5"), ("PRICE 1e2", "price: 100")])
def test_names_ignore_case_in_exact_caseless(tmp_path, capsys, left: str, right: str) -> None:
    for metric, expected in (("exact", 0), ("exact_caseless", 100)):
        found = scored(tmp_path, capsys, metric=metric, gold=[left], pred=[right], row_names=["Price"])
        assert found == expected


@pytest.mark.parametrize("name, left, right", [("unit price:", "unit\u00a0 price: 1.0", "unit price: 1")])
def test_white_space_and_compatible_forms_do_not_hide_a_name(tmp_path, capsys, name, left, right) -> None:
    assert scored(tmp_path, capsys, gold=[left], pred=[right], row_names=[name]) == 100
    assert scored(tmp_path, capsys, gold=["area m²: 2.0"], pred=["area m2: 2"], row_names=["area m²:"]) == 100


@pytest.mark.parametrize("names", [[], ["a:"], ["a"], ["a =", "b"]])
@pytest.mark.parametrize(
    "value, row, equal",
    [
        *[(1, "a: 1", True), (1.5, "a: 1.50", True), (1, "a: 2", False), ("1.50", "a: 1.50", True)],
        *[("1.50", "a: 1.5", False), ("01", "a: 01", True), (True, "a: true", True), (True, "a: false", False)],
        *[(None, "a: null", True), (None, "a:", True), (None, "a: 0", False), ([1, 2], "a: 1, 2.0", True)],
        *[
            (["x", "y"], "a: x, y", True),
            (["x"], "a: x", True),
            (["x", "y"], "a: y, x", False),
            ([], "a:", True),
            ({"b": 1}, 'a: {"b": 1}', True),
        ],
        *[("x", "b: x", False), (1, "1", False), ("x: y", "a: x: y", True)],
    ],
)
def test_rows_compared_with_an_object_are_read_by_its_keys_and_types(
    tmp_path, capsys, names: list[str], value: object, row: str, equal: bool
) -> None:
    more: dict[str, Any] = {"row_names": names} if names else {}
    for gold, predicted in (({"a": value}, [row]), ([row], {"a": value})):
        assert scored(tmp_path, capsys, gold=gold, pred=predicted, **more) == (100 if equal else 0)
        assert f1(gold, predicted) == (100 if equal else 0)


def test_marks_at_the_end_of_a_key_do_not_count() -> None:
    assert f1({"price:": 1}, {"price": 1.0}) == f1([("price =", 1)], {"price": 1}) == 100
    assert f1({"price": 1}, {"prices": 1}) == 0
