"""Groups of rows: a query sees its own group and group 0, in decoding and in training, against plain Python."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import grid
from pipejax.config import Config, DecodeConfig
from pipejax.decoding import Pipelined, with_forced
from pipejax.inference.generator import Generator
from pipejax.methods import Ids, Method, Target
from pipejax.model.slots import Blocks
from pipejax.testing import check_method
from pipejax.testing.recomputation import GivenQueries
from pipejax.training.step import batch_loss
from support import oracle, scripted
from support.batches import rows_of
from support.refusals import refuses
from support.tiny import MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")

EOS = 1


@dataclasses.dataclass(frozen=True)
class Grouped(Pipelined):
    """Algorithm 1 with `common` rows in group 0, and the others in groups of `size` rows."""

    common: int = 0
    size: int = 1

    def group(self, row: Any) -> Any:
        return (row >= self.common) * (1 + (row - self.common) // self.size)


@dataclasses.dataclass(frozen=True)
class InGroups(Method):
    """The method of `Grouped`, only for decoding."""

    delay: int = 0
    rows: int = 4
    common: int = 0
    size: int = 1
    name = "in_groups"
    can = frozenset({"sample", "score", "rules", "draft", "prefix", "rows", "stream", "serve"})

    def strategy(self, ids: Ids) -> Any:
        return Grouped(self.delay, 10, self.rows, bos=ids.bos, eos=ids.eos, common=self.common, size=self.size)

    def target(self, rows: Any, spells: Any, ids: Ids, *, most: int, where: str) -> Target:
        raise NotImplementedError


def group_of(method: InGroups, row: int) -> int:
    return 0 if row < method.common else 1 + (row - method.common) // method.size


def next_tokens_of(params: Any, encoded: np.ndarray, method: InGroups) -> oracle.NextTokens:
    """The greedy choice of the T5 from all tokens that each row sees, recomputed at every step."""

    def next_tokens(rows: list[list[int]]) -> list[int]:
        cells = oracle.coordinates(rows, method.delay)
        groups = [group_of(method, row) for row, _ in cells]
        visible = [
            [sees and there in (0, here) for sees, there in zip(line, groups, strict=True)]
            for line, here in zip(oracle.visibility(cells), groups, strict=True)
        ]
        fed = [token for row in rows for token in row]
        logits = oracle.decoder_logits(params, MORE_WORDS, encoded, fed, visible, oracle.distances(cells))
        last = np.cumsum([len(row) for row in rows]) - 1
        return [int(np.argmax(logits[at])) for at in last]

    return next_tokens


SETTINGS = [
    pytest.param(InGroups(), marks=pytest.mark.slow),
    InGroups(delay=1, common=1),
    pytest.param(InGroups(delay=1, size=2), marks=pytest.mark.slow),
    pytest.param(InGroups(delay=2, rows=5, common=1, size=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("method", SETTINGS, ids=str)
def test_answers_with_groups_equal_algorithm_1(method: InGroups) -> None:
    """Rows see their group and group 0 alone; with prefixes and with drafts, in batches."""
    rng, changed = np.random.default_rng(3), 0
    for seed in range(2):
        params = oracle.random_params(MORE_WORDS, np.random.default_rng(seed), eos_scale=1.3)
        generator = Generator(Config(model=MORE_WORDS, method=method), params, None)
        for number in range(2):
            ids = [[*rng.integers(2, 12, rng.integers(3, 9)).tolist(), EOS] for _ in range(2)]
            prefixes = [rng.integers(2, 12, n).tolist() for n in (1, 3, 2, 1)]
            given = [{"source_ids": x, "row_prefixes": prefixes[: method.rows]} for x in ids]
            found = generator.decode(given, batch_size=2, draft=("none", "source")[number], draft_tokens=2)
            for x, record in zip(ids, found, strict=True):
                encoded = oracle.encode(params, MORE_WORDS, x)
                rule: Any = {"delay": method.delay, "time_max": 10, "sub_max": method.rows, "stop": "empty_row"}
                expected = oracle.algorithm1(next_tokens_of(params, encoded, method), prefixes=prefixes, **rule)
                assert record["row_ids"] == expected.rows
                assert record["steps"] == expected.steps and record["calls"] < expected.calls
                paper = oracle.grid_next_tokens(params, MORE_WORDS, encoded, method.delay)
                changed += oracle.algorithm1(paper, prefixes=prefixes, **rule).rows != expected.rows
    assert changed > 2


@pytest.mark.slow
def test_isolated_row_equals_a_separate_answer() -> None:
    """With a group for each row and all rows at once, a row equals the sequential answer after its prefix."""
    params = oracle.random_params(MORE_WORDS, np.random.default_rng(1), eos_scale=1.3)
    generator = Generator(Config(model=MORE_WORDS, method=InGroups(rows=3)), params, None)
    plain = Generator(Config(model=MORE_WORDS, decode=DecodeConfig(max_length=10)), params, None)
    ids, prefixes = [5, 9, 7, EOS], [[3], [4, 6, 8], [9, 2]]
    (record,) = generator.decode([{"source_ids": ids, "row_prefixes": prefixes}])
    for row, prefix in zip(record["row_ids"], prefixes, strict=True):
        (own,) = plain.decode([{"source_ids": ids, "row_prefixes": [prefix]}], method="sequential")
        assert [row] == own["row_ids"]


def test_rows_of_other_groups_do_not_limit_forced_tokens() -> None:
    """By hand: three rows that start together, with names of 1, 4 and 0 tokens.

    In separate groups, the first call feeds both names, and the second the last token of each row. In the paper's
    grid the name of row 1 waits for row 0: the calls feed its tokens up to the times 1, 2, 4 and 5.
    """
    answer = [[2, 3], [5, 6, 7, 8, 9], [7]]
    forced = np.full((1, 3, 9), -1, np.int32)
    forced[0, 0, 0], forced[0, 1, :4] = 2, (5, 6, 7, 8)
    for strategy, calls in ((Pipelined(0, 9, 3), 4), (Grouped(0, 9, 3), 2)):
        named: Any = with_forced(strategy, 4)
        found: Any = scripted.decode(named, [[0]], [answer], width=10, forced=forced)
        assert rows_of(found, 0) == answer
        assert (found.steps[0], found.calls[0]) == (6, calls)


@pytest.mark.parametrize("blocks", [None, Blocks(interpret=True)], ids=["arrays", "blocks"])
def test_the_loss_equals_plain_python(blocks: Blocks | None) -> None:
    """Attention is computed by arrays of queries by keys, and in blocks."""
    rng, params = np.random.default_rng(0), oracle.random_params(MORE_WORDS, np.random.default_rng(4))
    method, source = InGroups(delay=1, common=1, size=2), [5, 9, 7, 3, EOS]
    rows = [rng.integers(2, 12, n).tolist() for n in (2, 4, 3, 1)]
    flat = grid.flatten(rows, delay=1, bos=0, eos=EOS)
    cells = [*zip(flat.row.tolist(), flat.time.tolist(), strict=True)]
    groups = [group_of(method, row) for row, _ in cells]
    visible = [
        [sees and there in (0, here) for sees, there in zip(line, groups, strict=True)]
        for line, here in zip(oracle.visibility(cells), groups, strict=True)
    ]
    encoded = oracle.encode(params, MORE_WORDS, source)
    logits = oracle.decoder_logits(params, MORE_WORDS, encoded, flat.inputs.tolist(), visible, oracle.distances(cells))
    expected = sum(
        weight * (np.log(np.exp(line).sum()) - line[token])
        for line, token, weight in zip(logits, flat.targets.tolist(), flat.weights.tolist(), strict=True)
    )
    batch = {name: jnp.asarray(x)[None] for name, x in flat._asdict().items()} | {
        "source": jnp.asarray([source]),
        "source_length": jnp.asarray([5]),
        "example": jnp.zeros((1, len(cells)), jnp.int32),
        "slots": jnp.asarray([len(cells)]),
    }
    model = MORE_WORDS.module(blocks=blocks)
    loss = jax.jit(lambda group: batch_loss(model, params, batch, None, group=group), static_argnums=0)
    strategy = method.strategy(Ids(0, EOS))
    total, count = loss(strategy.group)
    np.testing.assert_allclose(float(total), expected, rtol=1e-5)
    assert float(count) == flat.weights.sum()
    assert abs(float(loss(None)[0]) - expected) > 1e-3


def test_rule_gets_only_the_rows_that_a_query_sees() -> None:
    strategy = Grouped(0, 9, 5, common=1, size=2)
    fed = [(row, 0, 0) for row in range(5)] + [(row, 1, 10 + row) for row in range(5)]
    seen = [GivenQueries.of_slot(strategy, row, 1, fed).above_length[0].tolist() for row in range(5)]
    assert seen == [[0] * 5, [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 1, 0]]


@pytest.mark.parametrize(
    "group, found",
    [
        (lambda self, row: row - 1, "[-1, 0, 1]"),
        (lambda self, row: row / 2, "[0.0, 0.5, 1.0]"),
        (lambda self, row: 0, "0"),
    ],
)
def test_numbers_that_are_no_groups_are_refused(group: Any, found: str) -> None:
    frozen: Any = dataclasses.dataclass(frozen=True)
    kind = frozen(type("Wrong", (Pipelined,), {"group": group}))
    members = {"strategy": lambda self, ids: kind(0, 9, 3), "name": "own"}
    method = frozen(type("Own", (InGroups,), members))()
    with refuses("Wrong.group", found=f"{found} for rows 0, 1, ...", expected="a whole number of 0 or more"):
        Generator(Config(model=MORE_WORDS, method=method), {}, None).make_strategy()


class Letters:
    """A tokenizer whose tokens are the letters of a text."""

    def encode(self, text: str) -> list[int]:
        return [2 + ord(letter) for letter in text]


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `fields.py` of the page on methods."""
    text = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
    module: Any = types.ModuleType("fields")
    monkeypatch.setitem(sys.modules, "fields", module)  # required by dataclasses
    exec(text.split("Save this as `fields.py`", 1)[1].split("```python\n", 1)[1].split("```", 1)[0], vars(module))
    return module


def test_the_method_of_the_page_refuses_more_rows_than_prompts(fields: Any) -> None:
    rows, spells = ["red apples", "old maps", "new lamps"], Letters()
    assert fields.Fields().target(rows[:2], spells, Ids(0, EOS), most=40, where="train.jsonl:3").flat.row.max() == 1
    with refuses("train.jsonl:3", found="3 rows", expected="at most 2, one for each prompt"):
        fields.Fields().target(rows, spells, Ids(0, EOS), most=40, where="train.jsonl:3")


@pytest.mark.slow
def test_the_method_of_the_page_passes(fields: Any) -> None:
    """It needs no change in pipejax."""
    targets = [["red apples", "old"], ["red", "old lamps"], ["red maps", "old bread"]]
    line = check_method(fields.Fields(times=10), targets=targets)
    assert "answers agree with recomputation (decode, drafts, stream)" in line
