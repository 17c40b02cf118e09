"""`pipejax probe`: known models have known likelihoods, and hidden tokens have no effect."""

import dataclasses
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import checkpoint, grid, methods
from pipejax.apps import demo
from pipejax.apps.markup import escape
from pipejax.apps.probe import adaptation, likelihoods, measuring, probe_page, summary
from pipejax.apps.probe.likelihoods import HIDDEN, NONE, WHOLE, Condition, Meter, Parted, fit_shapes, of_rows, padded
from pipejax.apps.probe.probe_command import main
from pipejax.backbones.umt5 import UMT5Config
from pipejax.config import Config, DataConfig, GridConfig
from pipejax.data.batches import collate
from pipejax.data.encoding import Encoded, encode_example
from pipejax.data.examples import Example
from pipejax.data.shapes import choose_pairs
from pipejax.data.tokenizer import Tokenizer
from pipejax.methods import Ids
from pipejax.system.errors import UserError
from pipejax.training.step import batch_loss
from support import oracle
from support.staggered import Staggered
from support.tiny import DEEP, MODEL, change

BOS, EOS, SEPARATOR, WORDS = 0, 1, 2, 9
ALL = [*map(Condition, (WHOLE, 4, 2, 1, 0, HIDDEN)), *(Condition(WHOLE, row) for row in range(3))]


# A known model: each occurrence of a token among the visible tokens doubles its probability.


class Counting:
    """A model whose logits are counts of visible tokens, times ln 2; the source has no effect."""

    config, dtype = SimpleNamespace(vocab_size=WORDS), np.dtype("float32")

    def apply(self, variables: Any, *given: Any, method: str) -> Any:
        if method == "logits":
            return given[0] * math.log(2)
        _, _, tokens, mask, _ = given
        return mask.astype(jnp.float32) @ jax.nn.one_hot(tokens, WORDS)


def known(seen: Sequence[int], token: int) -> float:
    return math.log(sum(2 ** seen.count(word) for word in range(WORDS))) - seen.count(token) * math.log(2)


def expected(rows: list[list[int]], condition: Condition, *, ends: Sequence[int], least: int = WHOLE) -> list[float]:
    """The likelihoods of rows, each fed after its beginning, in plain Python.

    Token j of a row sees the first Δt + j - 1 tokens of the row above, and Δt more of each further row above.
    """
    fed = [[BOS if not i else ends[i - 1], *row] for i, row in enumerate(rows)]
    return scored(fed, rows, condition, ends=ends, least=least)


def scored(
    fed: list[list[int]], rows: list[list[int]], condition: Condition, *, ends: Sequence[int], least: int
) -> list[float]:
    """The likelihoods of `expected`, for rows with given inputs."""
    found = []
    for i, row in enumerate(rows):
        for j, token in enumerate([*row, ends[i]]):
            seen = fed[i][: j + 1]
            for k in range(i):
                count = min(condition.delay, least) * (i - k) + j
                seen = seen + fed[k][: 1 if condition.without == k else 1 + max(count, 0)]
            found.append(known(seen, token))
    return found


def drawn(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(3, WORDS) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 5))]


def sequential(rows: list[list[int]]) -> tuple[Parted, list[int]]:
    """Rows that a separator divides, and the tokens that end each of them."""
    ends = [SEPARATOR] * (len(rows) - 1) + [EOS]
    flat = grid.flatten([[t for row in rows for t in [*row, SEPARATOR]][:-1]], delay=1, bos=BOS, eos=EOS, final=False)
    row = np.repeat(np.arange(len(rows), dtype=np.int32), [len(row) + 1 for row in rows])
    return of_rows(Encoded("", np.asarray([EOS], np.int32), flat, False, False), row), ends


def measured(targets: Sequence[Parted], model: Any = None, params: Any = None) -> list[np.ndarray]:
    lengths = np.asarray([(len(t.encoded.source), len(t.row)) for t in targets])
    shapes = choose_pairs(lengths, size=3, group=2, pack=1, most=2, limit=(64, 64))
    meter, found = Meter(model or Counting(), params or {}, ALL, shapes, 3), dict[int, np.ndarray]()
    for batch in meter.batches(targets):
        found |= zip(batch, meter.measure([targets[i] for i in batch]), strict=True)
    return [found[i] for i in range(len(targets))]


@pytest.mark.parametrize("slots", [1, 512])
def test_a_known_model_has_the_known_likelihoods(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are split at a separator, and all conditions are computed in one pass or in separate passes."""
    monkeypatch.setattr(likelihoods, "SLOTS", slots)
    rng = random.Random(0)
    many = [drawn(rng) for _ in range(20)]
    for rows, found in zip(many, measured([sequential(rows)[0] for rows in many]), strict=True):
        for condition, nll in zip(ALL, found, strict=True):
            assert nll == pytest.approx(expected(rows, condition, ends=sequential(rows)[1]), abs=1e-5)


def test_rows_on_a_grid_see_no_more_than_they_were_trained_to() -> None:
    rng = random.Random(1)
    for delay in (1, 2, 3):
        for rows in (drawn(rng) for _ in range(5)):
            flat = grid.flatten(rows, delay=delay, bos=BOS, eos=EOS)
            target = of_rows(Encoded("", np.asarray([EOS], np.int32), flat, False, False), flat.row)
            (found,) = measured([target])
            counts, every = flat.weights > 0, [*rows, []]
            for condition, nll in zip(ALL, found, strict=True):
                wanted = on_grid(every, condition, delay)
                assert nll[counts] == pytest.approx(wanted, abs=1e-5)


def on_grid(rows: list[list[int]], condition: Condition, delay: int) -> list[float]:
    """The likelihoods of `expected`; every row begins with bos, and its eos is fed."""
    fed = [[BOS, *row, EOS] for row in rows]
    return scored(fed, rows, condition, ends=[EOS] * len(rows), least=delay)


# A real T5.


@pytest.fixture(scope="module")
def deep() -> tuple[Any, Any]:
    return DEEP.module(), oracle.random_params(DEEP, np.random.default_rng(3))


@pytest.mark.parametrize(
    "backbone",
    [pytest.param(DEEP, marks=pytest.mark.slow), UMT5Config(**dataclasses.asdict(DEEP))],
    ids=["T5", "UMT5"],
)
def test_likelihoods_with_visible_rows_equal_training_loss(backbone: Any) -> None:
    rng, own = random.Random(2), (backbone.module(), backbone.init_params(jax.random.key(0)))
    targets = [sequential(drawn(rng))[0] for _ in range(6)]
    found = measured(targets, *own)
    batch = {name: jnp.asarray(x) for name, x in collate([t.encoded for t in targets]).arrays.items()}
    total, count = batch_loss(*own, batch, None)
    assert sum(nll[0].sum() for nll in found) == pytest.approx(float(total), rel=1e-4)
    assert count == sum(len(t.row) for t in targets)


def test_hidden_tokens_do_not_change_likelihoods(deep: tuple[Any, Any]) -> None:
    """The first of three rows gets other tokens, which have no effect through a row between or through layers."""
    rows = [[3, 4, 5, 6, 7], [4, 8, 5, 3], [7, 6, 4]]
    other = [[3, 4, 8, 8, 5], *rows[1:]]
    a, b = measured([sequential(rows)[0], sequential(other)[0]], *deep)
    row, place = (getattr(sequential(rows)[0], name) for name in ("row", "place"))
    for condition, one, two in zip(ALL, a, b, strict=True):
        # Token 3 of the first row, the first that differs, is fed at place 3.
        blind = (row > 0) & (place + condition.delay * row < 3)
        if condition.without == 0:
            blind = row > 0
        assert one[blind] == pytest.approx(two[blind], abs=2e-5)
        if not blind[row > 0].all():
            assert np.abs(one - two)[(row > 0) & ~blind].max() > 1e-3
    assert (np.abs(a[0] - b[0])[row > 0] > 1e-3).any()


# The row of each slot.


@pytest.mark.parametrize(
    "separator, rows, said",
    [
        (" ; ", ["old lamps", "bread", "new red coins"], "0 0 0 1 1 2 2 2 2"),
        (" ; ", ["bread"], "0 0"),
        (" ; ", [], "0"),
        (" ", ["old lamps .", "bread .", "coins"], "0 0 0 1 1 2 2"),  # without a separator the last row has the eos
        (" . ; ", ["old lamps", "bread"], "0 0 0 0 1 1"),
    ],
)
def test_slots_of_a_sequential_target(separator: str, rows: list[str], said: str, tokenizer_files: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_files)
    method = methods.SequentialMethod(64, separator, 1)
    ids = Ids(MODEL.decoder_start_token_id, MODEL.eos_token_id)
    flat = method.target(rows, tokenizer, ids, most=64, where="x").flat
    assert method.rows_of(flat, rows, tokenizer, ids).tolist() == [int(row) for row in said.split()]
    cut = method.target(rows, tokenizer, ids, most=4, where="x").flat
    found = method.rows_of(cut, rows, tokenizer, ids).tolist()
    assert found == [int(row) for row in said.split()][: len(cut.inputs)] or found[:-1] == found[:-1]


# Averages.


def line(whole: list[list[float]], hidden: list[list[float]], without: list[list[float]], one: Any = None) -> Any:
    nll = dict.fromkeys(summary.NAMES, whole) | {"hidden": hidden, "delay_1": one or whole}
    return {"id": "", "nll": nll, "without": without}


def test_averages_equal_hand_computed_averages() -> None:
    lines = [
        line([[1, 1], [1, 1, 1, 1, 1]], [[1, 1], [4, 1, 2, 1, 1]], [[], [5.0]]),
        line([[2], [2]], [[2], [2]], [[], [1.0]]),
    ]
    found = summary.summary(lines)
    hidden = found["conditions"]["hidden"]
    assert (found["examples"], found["tokens"]) == (2, 9) and found["nll"]["whole"] == pytest.approx(11 / 9, abs=1e-6)
    assert hidden["cost"] == pytest.approx(4 / 9, abs=1e-6)
    # The interval of a ratio: residuals 4 - 7 r and 0 - 2 r with r = 4/9.
    residuals = (4 - 28 / 9) ** 2 + (8 / 9) ** 2
    assert hidden["error"] == pytest.approx(math.sqrt(2 * residuals) / 9, abs=1e-6)
    assert [hidden["rows"][row]["cost"] for row in "12"] == [0, pytest.approx(4 / 6, abs=1e-6)]
    assert {place: part["tokens"] for place, part in hidden["places"].items()} == {
        "first": 4,
        "second": 1,
        "third": 1,
        "later": 1,
        "last": 2,
    }
    assert hidden["cells"]["2"]["first"]["cost"] == 1.5 and hidden["cells"]["2"]["third"]["cost"] == 1
    assert "third" not in hidden["cells"]["1"]
    assert found["graph"][0] == [] and found["graph"][1][0]["cost"] == 1.0  # 6 nats, 6 tokens
    assert found["conditions"]["delay_2"]["cost"] == 0


def test_summary_says_what_each_delay_costs() -> None:
    flat = [[[0.0] * 3, [0.0] * 3, [0.0] * 3]] * 9
    first = [[0.0] * 3, [0.15, 0, 0], [0.05, 0, 0]]
    dear = [line(rows, first, [], first) for rows in flat]
    assert summary.summary(dear)["says"] == (
        "Δt = 1 costs 0.02 nats a token, mostly in first tokens of row 2; Δt = 2 costs nothing."
    )
    even = [[0.0] * 3, [0.9, 0, 0], [0.9, 0, 0]]
    assert "mostly in first tokens of rows 2 and 3" in summary.summary([line(f, even, [], even) for f in flat])["says"]
    spread = [[0.0] * 3, [0.3] * 3, [0.3] * 3]
    assert ", in all places of rows 2 and 3; " in summary.summary([line(f, spread, [], spread) for f in flat])["says"]
    hidden = summary.summary([line(f, first, []) for f in flat])["says"]
    assert hidden == "Δt = 1 costs nothing; hiding the rows above costs 0.02."
    assert summary.summary([line(f, f, []) for f in flat])["says"] == (
        "Δt = 1 costs nothing, and neither does hiding the rows above."
    )
    noise = [line(f, first if i % 2 else [[-x for x in r] for r in first], []) for i, f in enumerate(flat)]
    assert summary.summary(noise)["says"] == "Δt = 1 costs nothing, and neither does hiding the rows above."


WHOLE_ROWS = [[[2.0] * 3, [2.0] * 3]] * 9


@pytest.mark.parametrize("chance, advises", [(2.1, True), (2.0, False), (0.5, False), (None, True)])
def test_model_no_better_than_guessing_gets_no_advice(chance: float | None, advises: bool) -> None:
    """This also holds if hiding rows seems costly, and for the sentence of each condition."""
    for hidden in (WHOLE_ROWS[0], [[2.0] * 3, [2.9] * 3]):
        found = summary.summary([line(rows, hidden, [], hidden) for rows in WHOLE_ROWS], chance)
        assert found["says"].startswith("Δt = 1 costs") == advises and ("costs nothing" in found["says"]) <= advises
        assert all(bool(part["says"]) == advises for part in found["conditions"].values())
        if not advises:
            assert found["says"].startswith("The model does not know these answers: 2.00 nats per token")
            assert found["chance"] == chance and f"reaches {chance:.2f}. Its costs are" in found["says"]


def test_chance_level_uses_frequencies_or_the_vocabulary() -> None:
    assert summary.chance_of([7] * 1000, 50) == pytest.approx(-math.log(999 / 1000))
    assert summary.chance_of([5, 6, 7], 50) == pytest.approx(min(-math.log(2 / 4 / 48), math.log(50)))
    assert summary.chance_of([5], 50) == pytest.approx(math.log(50))
    seen, new = 2 / (3 + 2), 1 / (3 + 1) / 49  # 3 equal tokens among four, and a single token
    assert summary.chance_of([5, 5, 5, 6], 50) == pytest.approx(-(3 * math.log(seen) + math.log(new)) / 4)
    rng = np.random.default_rng(0)
    even = rng.integers(0, 50, 20_000).tolist()
    assert summary.chance_of(even, 50) == pytest.approx(math.log(50), abs=0.01)
    skewed = rng.choice(4, 20_000, p=[0.7, 0.1, 0.1, 0.1]).tolist()
    entropy = -0.7 * math.log(0.7) - 0.3 * math.log(0.1)
    assert summary.chance_of(skewed, 50) == pytest.approx(entropy, abs=0.02)


# The examples.


def test_equivalent_sources_are_in_one_part(run: Path, tmp_path: Path, said: list[str]) -> None:
    """Spaces and compatible forms of a letter make no other source; other letters do. Quotes in a TSV are text."""
    twins = ["the baker sang ", "the  baker slept", "the\u00a0clerk sang", "\uff54he clerk slept", "The baker sang"]
    measured = ["the baker  sang", "the baker slept", "the clerk sang", "the clerk slept", "a baker sang"]
    paths = [str(tmp_path / name) for name in ("in.tsv", "more.jsonl")]
    lines = ["source\ttargets", *(f'{text}\t"{i} | b' for i, text in enumerate(measured))]
    Path(paths[0]).write_text("\n".join(lines))
    rows = "data.rows=delimiter", "data.delimiter=|"
    with Path(paths[1]).open("w") as file:
        file.writelines(json.dumps({"source": text, "targets": "a | b"}) + "\n" for text in twins)
    work = measuring.prepare(str(run / "run"), *paths, best=False, limit=None, most=100, overrides=rows)
    assert [example.source for example in work.examples] == measured
    assert any(
        line.endswith("more.jsonl: 4 of 5 sources are measured as well, so costs may be too low") for line in said
    )
    few = measuring.prepare(str(run / "run"), *paths, best=False, limit=None, most=4, overrides=rows)
    drawn = [lesson.encoded.source.tolist() for lesson in few.lessons]
    every = [lesson.encoded.source.tolist() for lesson in work.lessons]
    assert len(drawn) == 4 and drawn == [source for source in every if source in drawn]


def test_padded_sizes_have_room_for_each_side() -> None:
    flat = grid.flatten([[5]], delay=1, bos=BOS, eos=EOS)
    long = Encoded("", np.full(41, 5, np.int32), flat, False, False)
    shapes = fit_shapes([of_rows(long, flat.row)] * 3, 2, group=1)
    sizes = {
        name: array.shape[1] for name, array in padded([of_rows(long, flat.row)], shapes).items() if array.ndim > 1
    }
    assert sizes["source"] >= 41 > sizes["inputs"] >= len(flat.row) and shapes.limit == (41, len(flat.row))


# The command.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path) -> Path:
    """A sequential checkpoint with random weights, and a file of 40 examples."""
    place = tmp_path_factory.mktemp("probe")
    config = change(Config(model=MODEL), train={"method": "sequential"}, data={"separator": " ; "})
    params = oracle.random_params(MODEL, np.random.default_rng(5))
    checkpoint.save_params(place / "run", config, params, tokenizer_source=tokenizer_files)
    chance = random.Random(0)
    with (place / "labelled.jsonl").open("w") as file:
        for i in range(40):
            words = [chance.choice(demo.NOUNS) for _ in range(12)]
            rows = [" ".join(chance.choices(words, k=chance.randint(1, 4))) for _ in range(chance.randint(0, 4))]
            file.write(json.dumps({"id": f"e{i}", "source": " ".join(words), "targets": rows}) + "\n")
    return place


def probe(run: Path, output: Path, *more: str) -> dict[str, Any]:
    given = ["--checkpoint", str(run / "run"), "--input", str(run / "labelled.jsonl"), "--output", str(output)]
    assert main([*given, "--batch-size", "2", *more]) == 0
    found: dict[str, Any] = json.loads((output / "probe.json").read_text())
    return found


def test_probe_writes_a_page_from_lines(run: Path, tmp_path: Path, said: list[str]) -> None:
    found = probe(run, tmp_path / "out")
    assert said[-1].endswith(found["says"]) and found["examples"] == 40
    assert found["says"].startswith("The model does not know these answers")  # random weights
    assert math.log(MODEL.vocab_size) >= found["chance"] <= found["nll"]["whole"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "examples.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"e{i}" for i in range(40)]
    assert found["tokens"] == sum(len(row) for line in lines for row in line["nll"]["whole"])
    assert found["nll"]["hidden"] != found["nll"]["whole"]
    shown = (tmp_path / "out" / "index.html").read_text()
    assert escape(found["says"]) in shown and "$" not in shown
    assert not re.findall(r"(?:src|href)=|url\(|https?://(?!www\.w3\.org/2000/svg)", shown)
    assert not [path.name for path in (tmp_path / "out").iterdir() if "unfinished" in path.name]
    assert probe(run, tmp_path / "seven", "--limit", "7")["examples"] == 7


@pytest.mark.parametrize("rows", [2, 8, 20])
def test_pictures_fit_a_narrow_page(rows: int) -> None:
    """A page of 500 pixels has 468 for pictures; everything is drawn within a picture."""
    chance = random.Random(0)

    def line(number: int) -> summary.Measured:
        base = [[chance.random() for _ in range(4)] for _ in range(rows)]
        nll = {name: [[x + i * r for x in row] for r, row in enumerate(base)] for i, name in enumerate(summary.NAMES)}
        return {
            "id": str(number),
            "nll": nll,
            "without": [[0.5 + chance.random() for _ in range(r)] for r in range(min(rows, summary.ROWS))],
        }

    found: Any = summary.summary([line(i) for i in range(9)])
    for svg in (probe_page.bars(found["conditions"]), probe_page.arcs(found["graph"])):
        width = int(re.findall(r'<svg [^>]*?width="(\d+)"', svg)[0])
        drawn = [float(x) for x in re.findall(r'(?:\b(?:x|cx)="|M|H|[01] )(-?[\d.]+)[" A]?', svg.partition(">")[2])]
        assert width <= 468 and drawn and min(drawn) >= 0 and max(drawn) <= width
    texts = re.findall(r"<text [^>]*>([\d.]+)</text>", probe_page.arcs(found["graph"]))
    assert sum("." in text for text in texts) == min(probe_page.LABELLED, math.comb(len(found["graph"]), 2))


def test_interrupted_probe_resumes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = probe(run, tmp_path / "whole")
    monkeypatch.setattr(measuring, "WINDOW", 3)
    calls, measure = list[int](), Meter.measure

    def stopped(self: Meter, targets: Sequence[Parted]) -> list[np.ndarray]:
        calls.append(len(targets))
        if len(calls) == 8:
            raise KeyboardInterrupt
        return measure(self, targets)

    monkeypatch.setattr(Meter, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        probe(run, tmp_path / "out")
    lines = tmp_path / "out" / "examples.jsonl"
    assert lines.read_text().count("\n") == 12 and not (tmp_path / "out" / "probe.json").exists()
    with lines.open("a") as file:
        file.write('{"id": "e12", "nll"')  # as after a kill
    with pytest.raises(UserError, match=r"--resume: .*found answers to another --input"):
        probe(run, tmp_path / "out", "--resume", "--limit", "20")
    calls[:] = [0] * 10
    again = probe(run, tmp_path / "out", "--resume")
    assert len(calls) == 10 + 14
    for name in summary.NAMES:
        assert again["nll"][name] == pytest.approx(whole["nll"][name], abs=1e-4)
    with pytest.raises(UserError, match=r"--resume: .*the output is complete, or was"):
        probe(run, tmp_path / "out", "--resume")


@pytest.mark.slow
def test_weights_learn_to_do_without_first(
    run: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens once: an interrupted probe resumes with these weights. The checkpoint does not change."""
    few = ("--limit", "12", "--adapt", str(run / "labelled.jsonl"), "--updates", "20")
    fast = ("--set", "train.learning_rate=0.01")
    before = probe(run, tmp_path / "before", "--limit", "12")
    assert any("without --adapt, costs measure more than dependence" in line for line in said)
    said.clear()
    whole = probe(run, tmp_path / "whole", *few, *fast)
    assert not any("without --adapt" in line for line in said)
    assert any("12 of 40 sources are measured as well" in line for line in said)
    for name in summary.NAMES:
        assert whole["nll"][name] < before["nll"][name] - 0.1
    assert (whole["updates"], whole["params_fp"]) == (20, before["params_fp"])
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {"examples.jsonl", "probe.json", "index.html"}

    monkeypatch.setattr(adaptation, "SAVED", 8)
    calls = list[int]()

    def stopped(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return likelihoods.padded(*given)

    monkeypatch.setattr(adaptation, "padded", stopped)
    with pytest.raises(KeyboardInterrupt):
        probe(run, tmp_path / "out", *few, *fast)
    assert said[-1].endswith("--resume continues after update 8")
    monkeypatch.setattr(Meter, "measure", None)
    with pytest.raises(TypeError):
        probe(run, tmp_path / "out", *few, *fast, "--resume")
    assert len(calls) == 12 + 12
    with pytest.raises(TypeError):
        probe(run, tmp_path / "out", *few, "--resume")  # with another rate it starts from the beginning
    assert len(calls) == 24 + 20
    monkeypatch.undo()
    monkeypatch.setattr(adaptation, "padded", None)
    again = probe(run, tmp_path / "out", *few, *fast, "--resume")
    for name in summary.NAMES:
        assert again["nll"][name] == pytest.approx(whole["nll"][name], abs=1e-4)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"examples.jsonl", "probe.json", "index.html"}


@pytest.mark.slow
def test_examples_for_adaptation_are_drawn_at_random(run: Path, tmp_path: Path, said: list[str]) -> None:
    probe(run, tmp_path / "out", "--limit", "3", "--adapt", str(run / "labelled.jsonl"), "--updates", "2")
    assert any("labelled.jsonl: 32 of 40 examples are drawn at random" in line for line in said)


@pytest.mark.slow
def test_an_update_takes_some_conditions_of_long_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likelihoods, "SLOTS", 1)
    asked, update = list[int](), adaptation._update

    def counted(module: Any, optimizer: Any, params: Any, state: Any, batch: Any, delay: Any, without: Any) -> Any:
        asked.append(len(delay))
        return update(module, optimizer, params, state, batch, delay, without)

    monkeypatch.setattr(adaptation, "_update", counted)
    config = change(Config(model=MODEL), train={"method": "sequential", "learning_rate": 0.01})
    rng = random.Random(4)
    targets = [sequential(drawn(rng))[0] for _ in range(5)]
    params = jax.tree.map(jnp.asarray, oracle.random_params(MODEL, np.random.default_rng(3)))
    before = sum(nll.sum() for nll in measured(targets, MODEL.module(), params))
    learned = adaptation.adapt(config, params, targets, ALL, 20, tmp_path / "learned")
    assert sum(nll.sum() for nll in measured(targets, MODEL.module(), learned)) < 0.9 * before
    assert set(asked) == {1}


@pytest.mark.parametrize(
    "more, line",
    [
        (["--adapt", "absent.jsonl"], "--adapt absent.jsonl: no such file"),
        (["--output", "{run}/labelled.jsonl"], "--output .*: found a file; expected a directory"),
        (["--output", "{run}"], "--output .*: found a directory"),
        (["--input", "absent.jsonl"], "--input absent.jsonl: no such file"),
        (["--input", "-"], "--input -: found standard input; expected a file"),
        (["--checkpoint", "absent"], "absent: no such checkpoint directory"),
        (["--set", "grid.delay=2"], "--set: grid.delay cannot be changed when rows are probed; expected one of data, "),
        (["--set", "data.targets=answers"], '.*labelled.jsonl:1: found no "answers"; expected a list of texts'),
        (["--set", "data.separator= zebra "], "data.separator: found ' zebra '"),
        (["--batch-size", "0"], "--batch-size: found 0; expected at least 1"),
        (["--limit", "1"], ".*labelled.jsonl: found only one row in each of 1 answers"),
    ],
)
def test_invalid_flags_are_refused(
    run: Path, tmp_path: Path, more: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--checkpoint", str(run / "run"), "--input", str(run / "labelled.jsonl"), "--output", "out"]
    with pytest.raises(UserError, match=f"^{line}"):
        main([*given, *(word.format(run=run) for word in more)])
    assert not (tmp_path / "out").exists()


def test_custom_method_without_grid_layout_is_refused(tmp_path: Path, run: Path, tokenizer_files: Path) -> None:
    """The refusal is one line; a method that lays rows out on the grid declares it."""
    config = dataclasses.replace(Config(model=MODEL), method=Staggered(rows=3, width=5))
    params = oracle.random_params(MODEL, np.random.default_rng(5))
    checkpoint.save_params(tmp_path / "run", config, params, tokenizer_source=tokenizer_files)
    given = ["--input", str(run / "labelled.jsonl"), "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"a checkpoint with staggered decoding, which does not lay .* another"):
        main(["--checkpoint", str(tmp_path / "run"), *given])


def test_pipelined_run_has_no_cost_of_a_larger_delay(tmp_path: Path, run: Path, tokenizer_files: Path) -> None:
    """It was trained only with its own Δt, so a larger Δt costs nothing less."""
    config = dataclasses.replace(
        Config(model=MODEL), grid=GridConfig(delay=2), data=DataConfig(separator=" ; ", task="demo")
    )
    params = oracle.random_params(MODEL, np.random.default_rng(5))
    checkpoint.save_params(tmp_path / "run", config, params, tokenizer_source=tokenizer_files)
    given = ["--input", str(run / "labelled.jsonl"), "--output", str(tmp_path / "out"), "--limit", "20"]
    assert main(["--checkpoint", str(tmp_path / "run"), *given]) == 0
    found = json.loads((tmp_path / "out" / "probe.json").read_text())["nll"]
    assert found["delay_4"] == found["delay_2"] == found["whole"]
    assert len({found["whole"], found["delay_1"], found["delay_0"], found["hidden"]}) == 4


def test_encoded_examples_keep_their_rows(tokenizer_files: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_files)
    config = change(Config(model=MODEL), train={"method": "sequential"}, data={"separator": " ; "})
    encoded = encode_example(Example("x", "bread", ("old lamps", "coins")), tokenizer, config, MODEL)
    ids = Ids(MODEL.decoder_start_token_id, MODEL.eos_token_id)
    target = of_rows(encoded, methods.trained(config).rows_of(encoded.target, ("old lamps", "coins"), tokenizer, ids))
    assert target.row.tolist() == [0, 0, 0, 1, 1] and target.place.tolist() == [0, 1, 2, 0, 1]
    assert NONE not in target.row.tolist()
