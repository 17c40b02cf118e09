"""The tagger of the drafter `spans`: loss, candidates and drafts equal plain Python, and its training."""

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax
from pipejax import checkpoint, grid
from pipejax.apps import demo
from pipejax.apps.teach import tagging
from pipejax.apps.teach.spans import MARKS, Candidates, Spans, Tagger, align
from pipejax.apps.teach.tags import STOP, SpanTags
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, MeshConfig, T5Config, TrainConfig
from pipejax.decoding import SourceIds
from pipejax.decoding.drafters import Written
from pipejax.inference.drafter_parameters import OpenDrafter
from pipejax.inference.generator import Generator
from pipejax.testing.answers import stream
from support import oracle
from support.refusals import refuses
from support.tiny import FEW_WORDS, MODEL, MORE_WORDS, change

pytestmark = pytest.mark.usefixtures("compiled_once")

END, WIDTH = 1, 6
FREE = SpanTags(rows=4, longest=5, entries=(0, 20, STOP, 0, 21, 22, STOP), initial=(9, 10))
NAMED = SpanTags(
    rows=3, longest=5, names=(30, STOP, 31, 32, STOP, 33, STOP), entries=(0, 20, STOP, 2, 20, STOP, 2, 21, 22, STOP)
)


def random_params(tags: SpanTags, seed: int, width: int = WIDTH, scale: float = 1.0) -> Any:
    """Parameters of a tagger for outputs of this width."""
    rng, names, entries = np.random.default_rng(seed), max(len(tags.row_names), 1), len(tags.table)
    shapes = {
        "kernel": (width, 2 * names + entries + 1),
        "bias": (2 * names + entries,),
        "other": (names,),
        "place": (),
        "order": (entries,),
    }
    return {key: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32) for key, shape in shapes.items()}


def batch_of(answers: list[list[list[int]]], sources: list[list[int]], delay: int, names: list[int]) -> dict[str, Any]:
    """A training batch with two examples in a sequence; `names`: the number of forced tokens of each row."""
    flats = [grid.flatten(rows, delay=delay, bos=0, eos=END, final=not names, names=names) for rows in answers]
    pairs = [flats[i : i + 2] for i in range(0, len(flats), 2)]
    slots = [sum(len(flat.inputs) for flat in pair) for pair in pairs]
    width, most = max(slots) + 2, max(map(len, sources)) + 1
    batch: dict[str, Any] = {
        key: np.zeros((len(pairs), width), np.float32 if key == "weights" else np.int32)
        for key in ("inputs", "targets", "weights", "row", "time", "example")
    }
    batch["weights"][:] = 1  # also outside the slots
    for i, pair in enumerate(pairs):
        begun = 0
        for number, flat in enumerate(pair):
            for key, values in flat._asdict().items():
                batch[key][i, begun : begun + len(values)] = values
            batch["example"][i, begun : begun + len(flat.inputs)] = number
            begun += len(flat.inputs)
    padded = np.full((len(sources), most), 5, np.int32)
    for source, ids in zip(padded, sources, strict=True):
        source[: len(ids)] = ids
    lengths = np.asarray([len(ids) for ids in sources], np.int32)
    return batch | {"slots": np.asarray(slots), "source": padded, "source_length": lengths}


def pairs_of(tags: SpanTags) -> dict[int, int]:
    """The first tokens of rows, by the tokens of their spans."""
    return dict(zip(tags.initial[::2], tags.initial[1::2], strict=True))


def places_of(tags: SpanTags, value: list[int], source: list[int]) -> list[int]:
    """The places of a value in a source."""
    pairs = pairs_of(tags)
    return [
        i
        for i in range(len(source) - len(value) + 1)
        if source[i + 1 : i + len(value)] == value[1:] and value[0] in (source[i], pairs.get(source[i]))
    ]


def logits_of(params: Any, encoded: np.ndarray) -> np.ndarray:
    """The logits [L, F] of one source's outputs [L, D]."""
    x = encoded / np.sqrt((encoded**2).mean(axis=1, keepdims=True) + 1e-6)
    found: np.ndarray = x @ np.asarray(params["kernel"])
    found[:, :-1] += np.asarray(params["bias"])
    return found


def softplus(x: float) -> float:
    """log(1 + exp(x))."""
    return float(np.logaddexp(0, x))


def lse(values: Any) -> float:
    """The logarithm of a sum of exponentials."""
    return float(np.logaddexp.reduce(np.asarray(list(values), float)))


def loss_of_ends(goes_on: np.ndarray, place: int, size: int) -> float:
    """The tokens of a span continue it, and the token after it does not."""
    total = sum(softplus(-goes_on[i]) for i in range(place + 1, place + size))
    return total + (softplus(goes_on[place + size]) if place + size < len(goes_on) else 0.0)


def plain_loss(tags: SpanTags, params: Any, encoded: np.ndarray, rows: list[list[int]], source: list[int]) -> float:
    """The loss of one example; `rows` have no names."""
    tags_of, names = logits_of(params, encoded[: len(source)]), max(len(tags.row_names), 1)
    own = [[i for i, (name, ids) in enumerate(tags.table) if [*ids] == row] for row in rows]
    evidence = [lse(tags_of[:, 2 * names + i]) for i in range(len(tags.table))]
    places, total = [places_of(tags, row, source) for row in rows], 0.0
    if tags.row_names:
        for k, (row, found) in enumerate(zip(rows, places, strict=True)):
            mine = [i for i, (name, _) in enumerate(tags.table) if name == k]
            every = [*tags_of[:, k], *(evidence[i] for i in mine), float(params["other"][k])]
            right = [*(tags_of[i, k] for i in found), *(evidence[i] for i in own[k] if i in mine)]
            total += lse(every) - lse(right or [float(params["other"][k])])
            if found:
                best = max(found, key=lambda i: tags_of[i, k])
                total += loss_of_ends(tags_of[:, names + k], best, len(row))
        return total
    order = tags_of[:, -1] + float(params["place"]) * np.arange(len(source))
    orders: list[float] = []
    for found, entry, row in zip(places, own, rows, strict=True):
        if found:
            best = max(found, key=lambda i: tags_of[i, 0])
            total += softplus(-lse(tags_of[i, 0] for i in found)) + loss_of_ends(tags_of[:, 1], best, len(row))
            orders.append(order[best])
        elif entry:
            anchor = int(tags_of[:, 2 + entry[0]].argmax())
            orders.append(order[anchor] + float(params["order"][entry[0]]))
    total += sum(softplus(tags_of[i, 0]) for i in {*range(len(source))} - {*itertools.chain(*places)})
    other = float(params["other"][0])
    total += softplus(other if all(a or b for a, b in zip(places, own, strict=True)) else -other)
    for i, one in enumerate(evidence):
        total += softplus(-one if any(i in entries for entries in own) else one)
    pairs = sum(softplus(a - b) for a, b in itertools.combinations(orders, 2))
    return total + pairs / max(len(orders), 1)


def random_example(rng: np.random.Generator, tags: SpanTags) -> tuple[list[list[int]], list[int]]:
    """Values of rows, some of which are in the source or in the table."""
    source = rng.integers(5, 14, rng.integers(4, 12)).tolist()
    rows: list[list[int]] = []
    for _ in range(len(tags.row_names) or rng.integers(0, 5)):
        begin, size = int(rng.integers(len(source))), int(rng.integers(1, 4))
        kinds = source[begin : begin + size], [20], [21, 22], [23, 5]
        value = [*kinds[rng.choice(4, p=(0.5, 0.2, 0.15, 0.15))]]
        pairs = pairs_of(tags)
        rows.append([pairs.get(value[0], value[0]), *value[1:]])
    return rows, source


@pytest.mark.parametrize(
    "tags, delay",
    [
        pytest.param(FREE, 1, marks=pytest.mark.slow),
        (FREE, 3),
        pytest.param(NAMED, 0, marks=pytest.mark.slow),
        (NAMED, 2),
    ],
)
def test_the_loss_equals_plain_python(tags: SpanTags, delay: int) -> None:
    rng = np.random.default_rng(delay)
    examples = [random_example(rng, tags) for _ in range(8)]
    names = [*map(len, tags.row_names)]
    answers = [
        [[*name, *row] for name, row in zip(tags.row_names or [()] * len(rows), rows, strict=True)]
        for rows, _ in examples
    ]
    batch = batch_of(answers, [source for _, source in examples], delay, names)
    encoded = rng.standard_normal((*batch["source"].shape, WIDTH)).astype(np.float32)
    params = random_params(tags, 3)
    outputs: Any = SimpleNamespace(batch=jax.tree.map(jnp.asarray, batch), encoded=jnp.asarray(encoded))
    expected = sum(plain_loss(tags, params, x, *example) for x, example in zip(encoded, examples, strict=True))
    (total, count), gradient = jax.value_and_grad(tags.loss, has_aux=True)(params, outputs)
    assert float(total) == pytest.approx(expected, rel=1e-4)
    assert int(count) == sum(len(rows) for rows, _ in examples)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize("tags", [FREE, pytest.param(NAMED, marks=pytest.mark.slow)])
def test_copies_that_fill_a_batch_do_not_count(tags: SpanTags) -> None:
    """`data.batches.fixed_batches` makes these copies, and their targets have weight 0."""
    examples = [random_example(np.random.default_rng(seed), tags) for seed in range(4)]
    names = [*map(len, tags.row_names)]
    answers = [
        [[*name, *row] for name, row in zip(tags.row_names or [()] * len(rows), rows, strict=True)]
        for rows, _ in examples
    ]
    batch = batch_of(answers, [source for _, source in examples], 1 if not names else 0, names)
    batch["weights"][1] = 0  # the last two examples
    encoded = np.random.default_rng(5).standard_normal((*batch["source"].shape, WIDTH)).astype(np.float32)
    params = random_params(tags, 3)
    outputs: Any = SimpleNamespace(batch=jax.tree.map(jnp.asarray, batch), encoded=jnp.asarray(encoded))
    total, count = tags.loss(params, outputs)
    pairs = [*zip(encoded, examples, strict=True)][:2]
    assert float(total) == pytest.approx(sum(plain_loss(tags, params, x, *example) for x, example in pairs), rel=1e-4)
    assert int(count) == sum(len(rows) for rows, _ in examples[:2])


def plain_span(tags: SpanTags, source: list[int], goes_on: np.ndarray, place: int) -> tuple[list[int], float]:
    """The tokens of the span that begins at a place, and the log-probability that it ends where it does."""
    stop = next((i for i in range(place + 1, len(source)) if goes_on[i] <= 0), len(source))
    judged = goes_on[place + 1 : stop + 1]
    size = min(stop - place, tags.longest - 1)
    pairs = pairs_of(tags)
    return [pairs.get(source[place], source[place]), *source[place + 1 : place + size]], -sum(
        map(softplus, -abs(judged))
    )


def plain_candidates(
    tags: SpanTags, params: Any, encoded: np.ndarray, source: list[int]
) -> list[tuple[list[int], float]]:
    """The candidates of one source with their probabilities."""
    found, names = logits_of(params, encoded[: len(source)]), max(len(tags.row_names), 1)
    evidence = [lse(found[:, 2 * names + i]) for i in range(len(tags.table))]
    candidates: list[tuple[list[int], float]] = []
    for k, name in enumerate(tags.row_names):
        mine = [i for i, entry in enumerate(tags.table) if entry.name == k]
        whole = lse([*found[:, k], *(evidence[i] for i in mine), float(params["other"][k])])
        place = int(found[:, k].argmax())
        value, log_prob = plain_span(tags, source, found[:, names + k], place)
        choices = [(float(found[place, k] - whole + log_prob), value)]
        choices += [(evidence[i] - whole, [*tags.table[i].ids]) for i in mine]
        chance, value = max(choices, key=lambda choice: choice[0])
        candidates.append(([*name, *value, END], float(np.exp(chance))))
    if tags.row_names:
        return candidates
    order = found[:, -1] + float(params["place"]) * np.arange(len(source))
    rows: dict[tuple[int, ...], tuple[float, float, float]] = {}
    best = sorted(range(len(source)), key=lambda i: -found[i, 0])[: tags.rows]
    every = [(float(found[i, 0]), *plain_span(tags, source, found[:, 1], i), float(order[i])) for i in best]
    for i, entry in enumerate(tags.table):
        anchor = int(found[:, 2 + i].argmax())
        every.append((evidence[i], [*entry.ids], 0.0, float(order[anchor] + params["order"][i])))
    for logit, value, log_prob, at in sorted(every, key=lambda one: -one[0]):
        if logit > 0 and (*value,) not in rows:
            rows[*value,] = at, 1 / (1 + np.exp(-logit)), np.exp(log_prob)
    before = 1.0
    for row, (_, one, whole) in sorted(rows.items(), key=lambda item: item[1][0])[: tags.rows]:
        before *= one
        candidates.append(([*row, END], float(before * whole)))
    likeliest: dict[tuple[int, ...], float] = {}
    for logit, value, *_ in sorted(every, key=lambda one: -one[0]):
        likeliest.setdefault((*value,), logit)
    rest = [logit for logit in likeliest.values() if logit <= 0]
    no_others = np.prod([1 / (1 + np.exp(one)) for one in [*rest, float(params["other"][0])]])
    return [*candidates, ([END], before * no_others)]


@pytest.mark.parametrize("tags", [FREE, NAMED, SpanTags(rows=3, longest=3)], ids=["free", "named", "without a table"])
def test_candidates_equal_plain_python(tags: SpanTags) -> None:
    rng, seen = np.random.default_rng(5), 0
    sources = [rng.integers(5, 14, rng.integers(1, 12)).tolist() for _ in range(24)]
    ids = np.full((24, 12), 7, np.int32)
    for row, source in zip(ids, sources, strict=True):
        row[: len(source)] = source
    encoded = rng.standard_normal((24, 12, WIDTH)).astype(np.float32)
    params = random_params(tags, 4)
    lengths = np.asarray([*map(len, sources)], np.int32)
    given = SourceIds(ids, lengths, encoded=jnp.asarray(encoded), parameters=Tagger(params, tags, END))
    found = jax.device_get(jax.jit(Spans().read)(given))
    for b, source in enumerate(sources):
        expected = plain_candidates(tags, params, encoded[b], source)
        rows = [row[:n].tolist() for row, n in zip(found.tokens[b], found.length[b], strict=True) if n]
        assert rows == [row for row, _ in expected]
        np.testing.assert_allclose(found.chance[b][: len(rows)], [chance for _, chance in expected], rtol=1e-3)
        seen += len(rows)
    assert seen > 48


def plain_numbers(candidates: list[list[int]], written: list[list[int]]) -> list[int | None]:
    """The candidate of each row."""
    found: list[int | None] = []
    following = 0
    for i, row in enumerate(written):
        if not row:
            found.append(following if following < len(candidates) else None)
            following += 1
            continue
        fits = [m for m, candidate in enumerate(candidates) if candidate[: len(row)] == row]
        nearest = min(fits, key=lambda m: (abs(m - i), m), default=None)
        following = following if nearest is None else nearest + 1
        found.append(nearest)
    return found


def test_rows_are_aligned_with_candidates_as_in_plain_python() -> None:
    """Rows with other texts take no candidate; the rows below a known row follow it."""
    rng, cases, most = np.random.default_rng(2), 400, 5
    tokens, lengths = np.zeros((cases, most, 4), np.int32), np.zeros((cases, most), np.int32)
    texts, sizes = np.zeros((cases, 6, 7), np.int32), np.zeros((cases, 6), np.int32)
    expected, others = [], 0
    for b in range(cases):
        candidates = [[*rng.integers(2, 4, rng.integers(1, 4)).tolist(), END] for _ in range(rng.integers(0, most))]
        candidates.append([END])
        written = [
            [*candidates[rng.integers(len(candidates))], 5][: rng.integers(0, 5)] if rng.random() < 0.6 else []
            for _ in range(6)
        ]
        for m, candidate in enumerate(candidates):
            tokens[b, m, : len(candidate)], lengths[b, m] = candidate, len(candidate)
        for i, row in enumerate(written):
            texts[b, i, : len(row)], sizes[b, i] = row, len(row)
        expected.append(plain_numbers(candidates, written))
        others += expected[-1] != [*range(6)]
    found = Candidates(jnp.asarray(tokens), jnp.asarray(lengths), jnp.ones((cases, most)))
    rows = Written(jnp.asarray(texts), jnp.asarray(sizes), jnp.zeros((cases, 6, 2), jnp.int32), jnp.zeros((cases, 6)))
    numbers = np.asarray(jax.jit(align, static_argnames="moves")(found, rows, moves=True))
    for b in range(cases):
        usable = [m if m < most and lengths[b, m] else None for m in numbers[b].tolist()]
        assert usable == expected[b]
    assert others > 100
    fixed = np.asarray(align(found, rows, moves=False))
    for b, i in itertools.product(range(cases), range(6)):
        size = sizes[b, i]
        same = i < most and tokens[b, i, :size].tolist() == texts[b, i, :size].tolist()
        assert fixed[b, i] == (i if same and size <= lengths[b, i] else most)


def test_drafts_continue_the_written_tokens() -> None:
    """By hand: two candidates and the empty row; row 0 has one token, row 1 a token that is not its candidate's."""
    rows = [[5, 6, END], [7, END], [END]]
    tokens = np.asarray([[[*row, 0, 0][:3] for row in rows]], np.int32)
    found = Candidates(jnp.asarray(tokens), jnp.asarray([[3, 2, 1]]), jnp.asarray([[0.9, 0.5, 0.1]]))
    source = SourceIds(np.zeros((1, 4)), np.ones(1), memory=found, parameters=Tagger({}, FREE, END))
    written = Written(
        jnp.asarray([[[5, 0, 0], [8, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]]),
        jnp.asarray([[1, 1, 0, 0, 0]]),
        jnp.zeros((1, 5, 2), jnp.int32),
        jnp.zeros((1, 5), jnp.int32),
        source,
    )
    _, draft = Spans().propose(None, written, 2)
    assert draft.count.tolist() == [[2, 0, 2, 1, 0]]
    assert [draft.tokens[0, i, :n].tolist() for i, n in enumerate(draft.count[0])] == [
        [6, END],
        [],
        [7, END],
        [END],
        [],
    ]
    assert [draft.trust[0, i].item() for i in (0, 2, 3)] == [sum(x > mark for mark in MARKS) for x in (0.9, 0.5, 0.1)]


CUE, STOPS, ABSENT, WORDS = 2, 3, 4, 40  # tokens of the sources below, and the number of tokens


def note(rng: np.random.Generator, kind: str) -> tuple[list[list[int]], list[int]]:
    """The rows of an answer, and a source of clauses. A clause with CUE asks for what follows it, up to STOPS.

    "order": the things asked for, in their order. "sorted": for each thing, one token, a row of three other tokens;
    rows are sorted by this token. "named": what follows each of three names, in any order, or ABSENT.
    """
    rows: list[list[int]] = []
    clauses = [[int(rng.integers(10, 20)), int(rng.integers(20, 30)), STOPS] for _ in range(rng.integers(1, 4))]
    if kind == "order":
        for word in rng.permutation(np.arange(20, 30))[: rng.integers(0, 5)].tolist():
            rows.append([*rng.integers(10, 20, rng.integers(0, 3)).tolist(), word])
            clauses.append([CUE, *rows[-1], STOPS])
    elif kind == "sorted":
        for word in sorted(rng.permutation(np.arange(20, 30))[: rng.integers(1, 5)].tolist()):
            rows.append([word + 10, word, word + 10])
            clauses.append([CUE, word, STOPS])
    else:
        for name in range(3):
            value = rng.integers(10, 20, rng.integers(1, 3)).tolist() if rng.random() < 0.8 else [ABSENT]
            rows.append(value)
            clauses += [[5 + name, *value, STOPS]] if value != [ABSENT] else []
    order = rng.permutation(len(clauses)) if kind != "order" else np.arange(len(clauses))
    return rows, [token for i in order for token in clauses[i]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["order", "sorted", "named"])
def test_a_tagger_learns_rows_from_outputs_that_mark_them(kind: str) -> None:
    """The encoder's outputs are the token and its neighbours. 19 of 20 held-out answers are proposed exactly."""
    import optax

    rng, most = np.random.default_rng(1), 48
    table: list[tuple[int, ...]] = [(i, ABSENT) for i in range(3)] if kind == "named" else []
    table += [(0, word + 10, word, word + 10) for word in range(20, 30)] if kind == "sorted" else []
    entries = tuple(token for entry in table for token in (*entry, STOP))
    tags = SpanTags(rows=5, longest=5, names=(5, STOP, 6, STOP, 7, STOP) if kind == "named" else (), entries=entries)

    def given(count: int) -> tuple[list[tuple[list[list[int]], list[int]]], dict[str, Any], np.ndarray]:
        examples = [note(rng, kind) for _ in range(count)]
        names = [[5], [6], [7]] if kind == "named" else None
        answers = [
            [[*name, *row] for name, row in zip(names or [[]] * len(rows), rows, strict=True)] for rows, _ in examples
        ]
        batch = batch_of(answers, [source for _, source in examples], 1, [1, 1, 1] if names else [])
        source = np.pad(batch["source"], ((0, 0), (0, most - batch["source"].shape[1])))
        real = np.arange(most) < batch["source_length"][:, None]
        marks = np.eye(WORDS)[np.where(real, source, 0)]
        around = [np.pad(marks, ((0, 0), (1, 1), (0, 0)))[:, i : i + most] for i in range(3)]
        # Slots are padded, so that all batches have one shape.
        wide = {key: np.pad(x, ((0, 0), (0, 80 - x.shape[1]))) for key, x in batch.items() if np.ndim(x) == 2}
        outputs = np.concatenate(around, axis=2).astype(np.float32)
        return examples, {**batch, **wide, "source": source}, outputs

    params = random_params(tags, 0, 3 * WORDS, scale=0.0)
    params["place"] = jnp.ones(())
    optimizer = optax.adam(0.05)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any, encoded: jax.Array) -> Any:
        outputs: Any = SimpleNamespace(batch=batch, encoded=encoded)
        gradient = jax.grad(lambda p: tags.loss(p, outputs)[0] / len(encoded))(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state

    for _ in range(300):
        _, batch, encoded = given(16)
        params, state = step(params, state, batch, encoded)
    examples, batch, encoded = given(60)
    source = SourceIds(
        batch["source"], batch["source_length"], encoded=jnp.asarray(encoded), parameters=Tagger(params, tags, END)
    )
    found = jax.device_get(jax.jit(Spans().read)(source))
    right = 0
    for b, (rows, _) in enumerate(examples):
        expected = [
            [*name, *row, END]
            for name, row in zip([[5], [6], [7]] if kind == "named" else [[]] * 5, rows, strict=False)
        ]
        expected += [] if kind == "named" else [[END]]
        right += expected == [row[:n].tolist() for row, n in zip(found.tokens[b], found.length[b], strict=True) if n]
    assert right >= 57


SETTINGS: list[Any] = [  # model, delay, stop, rows, source lengths, batch, prefixes, in a stream
    (FEW_WORDS, 1, "empty_row", 4, (3, 12), 4, False, True),
    (FEW_WORDS, 1, "literal", 5, (5, 9), 1, False, False),
    (FEW_WORDS, 2, "empty_row", 3, (2, 20), 8, False, False),
    (MORE_WORDS, 3, "empty_row", 4, (4, 12), 2, False, True),
    (MORE_WORDS, 0, "empty_row", 3, (4, 12), 4, True, True),
    (MORE_WORDS, 1, "empty_row", 4, (4, 30), 4, True, False),
    (MORE_WORDS, 2, "literal", 3, (2, 12), 4, False, False),
]
MODELS = 8  # random models with random taggers, for each setting


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting[1:3])))
def test_drafts_of_random_taggers_change_no_answer(setting: Any) -> None:
    """They are tested offline in batches of several lengths, and in a running batch with changing sources."""
    model, delay, stop, rows, lengths, batch, has_names, streams = setting
    names, words = [[3], [4, 2], [5]], model.vocab_size
    tags = SpanTags(rows=rows, longest=4, entries=(0, 3, 4, STOP, 0, 2, STOP))
    if has_names:
        tags = SpanTags(rows=3, longest=4, names=(3, STOP, 4, 2, STOP, 5, STOP), entries=(1, 3, STOP, 2, 4, 2, STOP))
    config = Config(
        model=model,
        grid=GridConfig(delay=delay, time_max=14, sub_max=rows, stop=stop),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(max_length=14, draft_tokens=3, batch_size=batch),
    )
    drafter, accepted = Spans(odds=(0.9, 0.95, 0.97)), 0
    params = oracle.random_params(model, np.random.default_rng(0))
    tagger = Tagger(random_params(tags, 0, model.d_model), tags, END)
    traced = change(config, decode={"trace": True})
    drafting = Generator(traced, params, None, drafter=OpenDrafter(drafter, params=tagger))
    plain = Generator(config, params, None)
    for seed in range(MODELS):
        rng = np.random.default_rng([seed, delay])
        params = oracle.random_params(model, rng)
        tagger = Tagger(random_params(tags, seed, model.d_model, scale=2.0), tags, END)
        plain.programs.set_params(params)
        drafting.programs.set_params(params, tagger)
        given: list[dict[str, Any]] = [
            {"source_ids": [*rng.integers(2, words, rng.integers(*lengths)).tolist(), END]} for _ in range(6)
        ]
        if has_names:
            given = [record | {"row_prefixes": names, "max_rows": 3} for record in given]
        expected = plain.decode(given)
        found = drafting.decode(given, drafter=drafter)
        accepted += sum(one.accepted for record in found for call in record.pop("trace") for one in call)
        assert [{**record, "calls": 0} for record in found] == [{**record, "calls": 0} for record in expected]
        if streams and seed < 2:
            checked = [drafting.source(record, "source", i) for i, record in enumerate(given)]
            method, strategy = drafting.method(), drafting.make_strategy(None, drafter)
            records = stream(drafting, method, checked, strategy=strategy)
            assert [record["row_ids"] for record in records] == [record["row_ids"] for record in expected]
    assert accepted > 0


SHORT = ("train.steps=4", "train.warmup_steps=0", "train.log_every=2", "train.evaluate_every=4", "train.batch_size=8")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, tokenizer_files: Path) -> Path:
    """Random weights as a pipelined checkpoint, the same as a sequential one, and a file of sources."""
    root = tmp_path_factory.mktemp("given")
    model = dataclasses.replace(MODEL, vocab_size=tokenizer.size)  # all tokens have a text
    params = oracle.random_params(model, np.random.default_rng(4), eos_scale=3.0)
    for method in ("pipelined", "sequential"):
        config = Config(
            model=model,
            grid=GridConfig(time_max=16, sub_max=4),
            data=DataConfig(task="none"),
            train=TrainConfig(method=method, length_group=2, shapes=1),
            decode=DecodeConfig(max_length=16),
            mesh=MeshConfig(data=1),
        )
        checkpoint.save_params(root / method, config, params, tokenizer_source=tokenizer_files)
    lines = [json.dumps({"id": e.id, "source": e.source}) + "\n" for e in demo.examples("train")[:60]]
    (root / "sources.jsonl").write_text("".join(lines))
    return root


@pytest.fixture(scope="module")
def tagged(given: Path, compiled_once: Any) -> Path:
    """A run with a tagger."""
    source = str(given / "sources.jsonl")
    assert tagging.teach_tagger(str(given / "pipelined"), source, given / "run", held_out=12, overrides=SHORT) == 0
    return given / "run"


@pytest.mark.slow
def test_training_a_tagger_does_not_change_answers(given: Path, tagged: Path) -> None:
    """The tagger is in the run or in `decode.draft_checkpoint`."""
    lines = [json.loads(line) for line in (given / "sources.jsonl").read_text().splitlines()]
    plain = pipejax.load(given / "pipelined")
    expected = plain.decode(lines)
    labels = [json.loads(line) for line in (tagged / "labels" / "answers.jsonl").read_text().splitlines()]
    assert [record["row_ids"] for record in labels] == [record["row_ids"] for record in expected]
    found = json.loads((tagged / "tagger.json").read_text())
    assert found["equal_answers"] == 100 and found["drafted_calls"] <= found["calls"]
    counts = found["labels"]
    assert counts["train"] + counts["held_out"] + counts["truncated"] + counts["other"] == 60
    assert pipejax.load(tagged).origin["params_fp"] == plain.origin["params_fp"]
    named = {"decode.draft": "spans"}
    for opened in (
        pipejax.load(tagged, overrides=named),
        pipejax.load(given / "pipelined", overrides={**named, "decode.draft_checkpoint": str(tagged)}),
    ):
        records = opened.decode(lines)
        assert [record["row_ids"] for record in records] == [record["row_ids"] for record in expected]
    again = tagging.teach_tagger(
        str(given / "pipelined"), str(given / "sources.jsonl"), tagged, held_out=12, overrides=SHORT
    )
    assert again == 0


@pytest.mark.slow
def test_tagger_that_cannot_be_used_raises_one_line(given: Path, tagged: Path, tmp_path: Path) -> None:
    source = str(given / "sources.jsonl")
    with refuses(str(given / "sequential"), found="sequential", expected="whose answers have rows"):
        tagging.teach_tagger(str(given / "sequential"), source, tmp_path / "run")
    with refuses("decode.draft: spans", found="no tagger in the checkpoint", expected="pipejax teach --tagger"):
        pipejax.load(given / "pipelined", overrides={"decode.draft": "spans"})
    config = pipejax.load(given / "pipelined").config
    assert isinstance(config.model, T5Config)
    other = oracle.random_params(config.model, np.random.default_rng(8))
    checkpoint.save_params(tmp_path / "other", config, other)
    with refuses(f"decode.draft: {tagged}", found="trained for the model with params_fp"):
        pipejax.load(tmp_path / "other", overrides={"decode.draft": "spans", "decode.draft_checkpoint": str(tagged)})


def test_rows_are_found_in_sources_by_the_text_of_their_first_token() -> None:
    """By hand: token 5 has the text of token 9, like "red" after a bracket and at the beginning of a word."""
    tokenizer: Any = SimpleNamespace(decode=lambda ids: {5: " red", 9: "red"}.get(ids[0], f"{ids[0]}"))
    finder = tagging.SpanFinder(tokenizer)
    source = np.asarray([4, 9, 6, 7, 5, 6])
    assert finder.find([5, 6], source) == 4
    assert finder.find([5, 6, 7], source) == 1
    assert finder.find([8], source) is None and finder.find([4] * 7, source) is None
