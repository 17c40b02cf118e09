"""The engine: whatever else it answers, each answer is what decoding that source alone gives."""

import dataclasses
import gc
import logging
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from pipejax import checkpoint
from pipejax.apps.schemas import row_schema as schema_lib
from pipejax.apps.serving.engine import Closed, Engine, Event, Full, Request
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.data.shapes import memory_length
from pipejax.decoding import Decoded, Sampling
from pipejax.inference import programs
from pipejax.inference.compiler import LAST, LATER, PLANNED, WANTED, Compiler
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import Encodings, RunningBatch, Steps, Switch
from pipejax.inference.sources import Source
from pipejax.kernels.backends import OwnKernel
from pipejax.system.errors import UserError
from support import oracle
from support.served import wait_until
from support.tiny import MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def generator():
    config = Config(
        model=MORE_WORDS,
        grid=GridConfig(delay=2, time_max=16, sub_max=5),
        train=TrainConfig(objective="pipelined"),
        decode=DecodeConfig(max_length=30, scores=True),
    )
    return Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)


@pytest.fixture(scope="module")
def fast(kernel):
    """One that our kernel decodes; its answers have no end, as the eos is never the likeliest."""
    sizes = dataclasses.replace(MORE_WORDS, vocab_size=300, d_model=32, d_kv=16, d_ff=32)
    config = Config(model=sizes, train=TrainConfig(objective="sequential"), decode=DecodeConfig(max_length=1_000_000))
    params = oracle.random_params(sizes, np.random.default_rng(4))
    params = {**params, "shared": {"embedding": jax.numpy.asarray(params["shared"]["embedding"]).at[1].set(0.0)}}
    return Generator(config, params, None, backend=OwnKernel("auto", kernel))


def texts(count):
    rng = np.random.default_rng(count)
    return [[*rng.integers(2, 12, rng.choice([3, 20, 70])).tolist(), 1] for _ in range(count)]


def request(i, ids, strategy="pipelined", **more):
    chosen = {name: more.pop(name) for name in ("temperature", "top_k", "top_p", "seed") if name in more}
    return Request(Source(i, ids), strategy, Sampling(**chosen), **more)


def assert_same(found, expected):
    scores = ("log_prob", "log_probs")
    assert {k: v for k, v in found.items() if k not in scores} == {k: v for k, v in expected.items() if k not in scores}
    assert found["log_prob"] == pytest.approx(expected["log_prob"], abs=1e-3)
    for a, b in zip(found["log_probs"], expected["log_probs"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


@pytest.mark.slow
def test_answers_are_those_of_each_alone(generator):
    """Both strategies, many more requests than places, sources of all lengths, a cache that grows."""
    given = texts(20)
    engine = Engine(generator, places=3, queue=100)
    names = ["pipelined" if i % 3 else "sequential" for i in range(len(given))]
    answers = [engine.submit(request(i, ids, name)) for i, (ids, name) in enumerate(zip(given, names, strict=True))]
    found = [[] for _ in answers]
    answers[0].listen(found[0].extend)
    for i in range(2, len(answers)):
        found[i] = list(answers[i].events())
    engine.close(drain=True, seconds=60)
    answers[1].listen(found[1].extend)  # all of it has come
    assert (engine.answered, engine.failed, engine.running, engine.waiting) == (20, 0, 0, 0)
    expected = {name: generator.decode(given, strategy=name, batch_size=1) for name in {*names}}
    for i, (events, name) in enumerate(zip(found, names, strict=True)):
        *tokens, record = events
        assert_same(record, expected[name][i])
        rows = [[event.token for event in tokens if event.row == r] for r in range(5)]
        assert [row for row in rows if row] == [row for row in record["row_ids"] if row]
        assert all(isinstance(event, Event) for event in tokens)
        if name == "pipelined":  # what is written in a step is told before what is written in a later one
            seen, times = [0] * 5, []
            for event in tokens:
                times.append(2 * event.row + seen[event.row])
                seen[event.row] += 1
            assert times == sorted(times)


@pytest.fixture(params=["source", "jacobi", "model"])
def drafting(request, generator, tmp_path):
    """The generator with drafts of each kind."""
    small = dataclasses.replace(MORE_WORDS, d_model=12, num_heads=3)
    params = oracle.random_params(small, np.random.default_rng(7))
    checkpoint.save_params(tmp_path / "small", dataclasses.replace(generator.config, model=small), params)
    own = {"draft": request.param, "draft_tokens": 3}
    own |= {"draft_checkpoint": str(tmp_path / "small")} if request.param == "model" else {}
    config = dataclasses.replace(generator.config, decode=dataclasses.replace(generator.config.decode, **own))
    return Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipelined", pytest.param("sequential", marks=pytest.mark.long)])
def test_drafts_keep_answers_and_reduce_calls(generator, drafting, strategy):
    """Sources of several lengths come and go, so that drafters meet longer ones in the middle of an answer."""
    given = texts(9)
    expected = generator.decode(given, strategy=strategy, batch_size=1)
    engine = Engine(drafting, places=3, queue=99)
    sampled = [request(100 + i, ids, strategy, temperature=0.7, seed=i) for i, ids in enumerate(given[:3])]
    few = [request(200 + i, ids, strategy, max_tokens=4) for i, ids in enumerate(given[:3])]
    # Drafts may be right up to the end in the call that generates the last token asked for.
    few += [
        request(300 + i, ids, strategy, max_tokens=max(sum(map(len, one["row_ids"])), 1))
        for i, (ids, one) in enumerate(zip(given, expected, strict=True))
    ]
    requests = [*(request(i, ids, strategy) for i, ids in enumerate(given)), *sampled, *few]
    found = {one.source.id: list(answer.events()) for one, answer in [(one, engine.submit(one)) for one in requests]}
    engine.close(drain=True, seconds=60)
    plain = Engine(generator, places=3, queue=99)
    undrafted = {one.source.id: list(plain.submit(one).events()) for one in [*sampled, *few]}
    plain.close(drain=True, seconds=60)
    saved = 0
    for i, wanted in [*enumerate(expected), *((i, undrafted[i][-1]) for i in undrafted)]:
        *events, record = found[i]
        assert_same({**record, "calls": 0}, {**wanted, "calls": 0, "id": i})
        if wanted["truncated"] != "max_tokens":  # calls go on until a pause shows that there are enough tokens
            assert record["calls"] <= wanted["calls"]
            saved += wanted["calls"] - record["calls"]
        if i in undrafted:  # the same tokens in the same order
            tokens = [(event.row, event.token) for event in events]
            assert tokens == [(event.row, event.token) for event in undrafted[i][:-1]]
    assert saved > 0


@pytest.mark.slow
def test_a_longer_source_joins_a_grown_cache_without_compiling(monkeypatch):
    monkeypatch.setattr(programs, "SLOTS", (6,))
    config = Config(
        model=MORE_WORDS,
        grid=GridConfig(delay=1, time_max=24, sub_max=2),
        train=TrainConfig(objective="pipelined"),
        decode=DecodeConfig(draft="source", draft_tokens=1),
    )
    made = Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)
    compiled = {}
    batch = RunningBatch(made.programs, made.make_strategy("pipelined"), 2, compiled=compiled)

    def meet(needs):
        for key, make in needs.items():
            make()
            compiled[key] = True

    rng = np.random.default_rng(0)
    short, longer = ([*rng.integers(2, 12, length).tolist(), 1] for length in (20, 70))
    meet(batch.needs(len(short), logits=False, adapter=None))
    place = batch.add(short, log_probs=False)
    while not batch.lacks:
        assert not batch.advance(1)[1][place], "the answer is too short for its cache to grow"
    meet(batch.lacks)
    batch.advance(1)
    meet(batch.needs(len(longer), logits=False, adapter=None))
    known = {*compiled}
    batch.add(longer, log_probs=False)
    batch.advance(1)
    assert {*compiled} == known


@pytest.mark.slow
def test_samples_are_those_of_the_seed(generator):
    """Whoever else is there; a greedy request stays greedy beside them."""
    ids = texts(1)[0]
    engine = Engine(generator, places=4, queue=100)
    given = [request(0, ids, temperature=1.0, seed=seed, top_k=9, top_p=0.95) for seed in (1, 2, 1)]
    answers = [engine.submit(x) for x in [*given, request(0, ids)]]
    one, two, again, greedy = (list(answer.events())[-1] for answer in answers)
    engine.close(drain=False, seconds=60)
    assert one["row_ids"] == again["row_ids"] != two["row_ids"]
    assert greedy["row_ids"] == generator.decode([ids])[0]["row_ids"]


@pytest.mark.slow
def test_answers_to_a_source_that_was_just_encoded(generator):
    """Those that decoding gives, of sources in turn and together; the encoder reads each of them once."""
    given = [[5, 6, 7, 1], [8, 9, 1], [2, 3, 4, 5, 6, 1]]
    expected = generator.decode(given, strategy="sequential", batch_size=1)
    engine = Engine(generator, places=2, queue=9, encodings=2)
    counts = []
    for turn in ([0], [0], [1], [0], [2, 0], [1]):  # of two that are kept, 2 makes 1 leave
        answers = [engine.submit(request(i, given[i], "sequential")) for i in turn]
        for i, answer in zip(turn, answers, strict=True):
            assert_same(list(answer.events())[-1], expected[i])
        counts.append((engine.encodings.hits, engine.encodings.misses))
    engine.close(drain=True, seconds=60)
    assert counts == [(0, 1), (1, 1), (1, 2), (2, 2), (3, 3), (3, 4)]


@pytest.mark.slow
def test_our_kernel_leaves_an_encoding_as_it_was(fast):
    engine, ids = Engine(fast, places=2, queue=5, encodings=4), texts(3)
    engine.warm_up(4)
    wait_until(lambda: engine.compiler.prepared == engine.compiler.planned)
    assert engine.encodings.misses == engine.encodings.bytes == 0
    found = [
        list(engine.submit(request(i, ids[i], "sequential", max_tokens=20)).events())[:-1] for i in (0, 1, 2, 0, 1)
    ]
    assert (engine.encodings.hits, engine.encodings.misses) == (2, 3)
    engine.close(drain=True, seconds=60)
    assert found[3:] == found[:2] and all(len(tokens) == 20 for tokens in found)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_encodings_that_are_kept(most):
    """Beside plain lists of what was asked for the latest; the same ids with another adapter are another source."""
    kept, asked, hits = Encodings(most), [], 0
    for number in np.random.default_rng(most).integers(0, 6, 200).tolist():
        ids, adapter = np.arange(number // 2 + 1, dtype=np.int32), number % 2 or None
        hits += number in asked[-most:] if most else 0
        memory = kept.of(ids, adapter, lambda ids, adapter: jax.numpy.asarray(ids + 10 * (adapter or 0)))
        assert memory.tolist() == (ids + 10 * (number % 2)).tolist()
        asked = [*(other for other in asked if other != number), number]
        assert kept.hits == hits
        assert kept.bytes == sum(4 * (n // 2 + 1) for n in (asked[-most:] if most else []))
    assert kept.hits + kept.misses == 200
    kept.clear()
    assert kept.bytes == kept.hits == kept.misses == 0


def test_who_waits_hears_that_there_can_be_no_batch(generator, monkeypatch):
    """Such as for want of memory; and the next one has another try."""

    def fails(*given, **more):
        raise MemoryError("no room for a batch")

    engine = Engine(generator, places=2, queue=4)
    with monkeypatch.context() as patch:
        patch.setattr("pipejax.apps.serving.engine.RunningBatch", fails)
        with pytest.raises(MemoryError, match="no room"):
            list(engine.submit(request(0, [3, 1])).events())
    assert (engine.waiting, engine.running) == (0, 0)
    assert isinstance(list(engine.submit(request(0, [3, 1])).events())[-1], dict)
    engine.close(drain=False, seconds=60)


@pytest.mark.slow
def test_requests_have_a_batch_for_themselves_or_share_one(generator):
    """One that comes alone, unless the last one was not; those that come together share."""
    engine, given = Engine(generator, places=3, queue=9), [request(i, ids) for i, ids in enumerate(texts(6))]

    def lanes(requests):
        with engine._change:  # they come at once
            answers = [engine.submit(one) for one in requests]
        for answer in answers:
            list(answer.events())
        return {lane.places: batch for lane, batch in engine._batches.items() if batch._encoded is not None}

    assert set(lanes(given[:1])) == {1}
    assert set(lanes(given[:3])) == {1, 3}
    wide = engine._batches.pop(next(lane for lane in engine._batches if lane.places == 3))
    assert wide.places == 3 and set(lanes(given[:1])) == {1, 3}  # somebody may come beside it, as before
    engine.close(drain=False, seconds=60)


def test_no_pause_comes_before_so_many_tokens_can_be_there(generator):
    """In step t the rows are open that start by then, at the most; a sequential answer grows by a token a step."""
    grid = RunningBatch(generator.programs, generator.make_strategy("pipelined"), 1)
    line = RunningBatch(generator.programs, generator.make_strategy("sequential"), 1)
    for taken in (0, 1, 5, 16, 40):
        for tokens in range(1, 60):
            grown = steps = 0
            while grown < tokens:
                grown += sum(2 * row <= taken + steps for row in range(5))
                steps += 1
            assert grid.steps_for(tokens, taken) == steps and line.steps_for(tokens, taken) == tokens
    assert line.steps_for(10**6, 0) == 10**6 > grid.steps_for(10**6, 0) > 10**6 // 5  # in no time


@pytest.mark.slow
def test_an_answer_of_so_many_tokens(generator):
    ids = texts(1)[0]
    engine = Engine(generator, places=2, queue=1)
    *tokens, record = engine.submit(request(0, ids, max_tokens=5)).events()
    *all_tokens, full = engine.submit(request(0, ids)).events()
    engine.close(drain=True, seconds=60)
    assert len(tokens) == 5 < len(all_tokens)
    assert [(event.row, event.token) for event in tokens] == [(event.row, event.token) for event in all_tokens[:5]]
    assert record["truncated"] == "max_tokens" and sum(map(len, record["row_ids"])) == 5
    assert [row[: len(cut)] for row, cut in zip(full["row_ids"], record["row_ids"], strict=False)] == record["row_ids"]
    assert full["row_ids"] == generator.decode([ids])[0]["row_ids"]
    assert record["log_prob"] == pytest.approx(sum(event.log_prob for event in tokens), abs=1e-3)


def test_who_waits_who_leaves_and_who_comes_too_late(generator):
    given = texts(6)
    engine = Engine(generator, places=1, queue=2)
    with engine._change:  # the engine does not see them before all are there
        answers = [engine.submit(request(i, given[i])) for i in range(3)]
        with pytest.raises(Full):
            engine.submit(request(3, given[3]))
        answers[1].cancel()
    last = list(answers[2].events())[-1]
    assert_same(last, {**generator.decode([given[2]])[0], "id": 2})
    with pytest.raises(Closed):
        list(answers[1].events())
    assert engine.answered == 2
    engine.close(drain=True, seconds=60)
    with pytest.raises(Closed):
        engine.submit(request(4, given[4]))


def test_what_an_engine_does_not_have_is_refused(generator):
    for key, value, strategy in (("limit", "source", "pipelined"), ("beams", 2, "sequential")):
        decode = DecodeConfig(max_length=30, **{key: value})
        config = dataclasses.replace(generator.config, decode=decode, train=TrainConfig(objective=strategy))
        other = Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)
        with pytest.raises(UserError, match=f"decode.{key}: found"):
            Engine(other, places=1, queue=1)


def test_a_thrown_switch_lets_it_pause_after_a_step(fast):
    switch = Switch()
    batch = RunningBatch(fast.programs, fast.make_strategy("sequential"), 2, switch)
    place = batch.add(texts(1)[0])
    for steps in (3, 5):
        assert batch.advance(steps, often=False)[0].steps[place] == (3 if steps == 3 else 8)
    switch.throw()
    assert batch.advance(50, often=False)[0].steps[place] == 9
    switch.reset()
    assert batch.advance(50, often=False)[0].steps[place] == 59
    thrower = threading.Timer(0.2, switch.throw)
    thrower.start()
    steps = batch.advance(often=False)[0].steps[place]  # alone it would take minutes
    assert 59 < steps < 100_000
    thrower.join()


def test_listening_is_no_effect(fast):
    """JAX calls a program with effects in Python, array by array, and a stream calls one for each look."""
    given = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((2,), np.uint32)
    assert not jax.make_jaxpr(fast.programs.backend.listen)(*given).effects


def test_who_comes_is_not_kept_waiting_by_a_long_answer(fast):
    engine = Engine(fast, places=2, queue=5)
    long, short = texts(2)
    first = engine.submit(request(0, long, "sequential", at_once=False))
    while not engine.running:
        time.sleep(0.01)
    record = list(engine.submit(request(1, short, "sequential", max_tokens=3, at_once=False)).events())[-1]
    assert record["truncated"] == "max_tokens" and sum(map(len, record["row_ids"])) == 3
    wait_until(lambda: engine.running + engine.waiting == 1)  # the first has a place, or waits for a larger cache
    first.cancel()
    with pytest.raises(Closed):
        list(first.events())
    engine.close(drain=True, seconds=60)


def test_a_failure_is_told_and_the_engine_goes_on(generator, monkeypatch):
    given = texts(2)
    engine = Engine(generator, places=2, queue=5)
    with monkeypatch.context() as patch:
        patch.setattr("pipejax.inference.running_batch.RunningBatch.advance", lambda self, most, often: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(engine.submit(request(0, given[0])).events())
    assert_same(list(engine.submit(request(0, given[0])).events())[-1], generator.decode([given[0]])[0])
    assert engine.failed == 1
    engine.close(drain=True, seconds=60)


# The compiler beside the engine.


class Held:
    """Holds back what an engine asks its compiler for, until it is let go."""

    def __init__(self, engine):
        self.engine, self.ask, self.kept = engine, engine.compiler.ask, []
        engine.compiler.ask = lambda needs, order=WANTED: self.kept.append(needs)

    def let_go(self):
        self.engine.compiler.ask = self.ask
        for needs in self.kept:
            self.ask(needs)


def record_in(answer):
    return list(answer.events())[-1]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["length", "strategy", "scores", "temperature"])
def test_others_go_on_while_a_request_waits_for_its_programs(generator, other):
    """Whatever is new about it; its answer is the one of decoding."""
    engine, short = Engine(generator, places=2, queue=9), [5, 6, 7, 1]
    for _ in range(2):  # alone and beside each other
        for answer in [engine.submit(request(0, short, log_probs=False)) for _ in range(2)]:
            record_in(answer)
    held, ids, more = Held(engine), short, {"log_probs": False}
    strategy = "sequential" if other == "strategy" else "pipelined"
    if other == "length":
        ids = [*short[:3] * 25, 1]
    elif other == "scores":
        more = {"log_probs": True}
    elif other == "temperature":
        more |= {"temperature": 1.0, "seed": 3}
    waits = engine.submit(request(0, ids, strategy, **more))
    wait_until(lambda: held.kept)
    for _ in range(3):
        assert record_in(engine.submit(request(0, short, log_probs=False)))["row_ids"]
    assert (engine.waiting, engine.running) == (1, 0) and waits.awaits
    held.let_go()
    found = record_in(waits)
    if other != "temperature":
        assert found["row_ids"] == generator.decode([ids], strategy=strategy)[0]["row_ids"]
    engine.close(drain=True, seconds=60)


@pytest.mark.slow
def test_an_answer_that_outgrows_what_is_compiled_makes_room(generator, monkeypatch):
    """It begins anew when the larger cache is there: no token is told twice, and all are those of decoding."""
    given = texts(4)
    decoded = generator.decode(given, batch_size=1)
    monkeypatch.setattr("pipejax.inference.programs.SLOTS", (8, 24))
    engine = Engine(generator, places=1, queue=9)
    events = [[] for _ in given]
    for answer, found in zip([engine.submit(request(i, ids)) for i, ids in enumerate(given)], events, strict=True):
        found += answer.events()
    assert engine.failed == 0 and engine.answered == len(given)
    engine.close(drain=True, seconds=60)
    sizes = {key.slots for key in engine.compiler.compiled if isinstance(key, Steps)}
    assert len(sizes) > 1 and min(sizes) == 8  # so that some were put off
    for (*tokens, record), expected in zip(events, decoded, strict=True):
        assert_same(record, {**expected, "id": record["id"]})
        rows = [[event.token for event in tokens if event.row == r] for r in range(5)]
        assert [row for row in rows if row] == [row for row in record["row_ids"] if row]


class FakeBatch:
    """Writes three tokens for each of a source, one a step; a cache has a slot a token."""

    cache_sizes, has_drafts, made = (8, 64), False, 0

    def __init__(self, programs, strategy, places, switch, encodings, compiled):
        self.strategy, self.places, self.compiled = strategy, places, compiled
        self.starts, self.slots, self.lacks, self.schema = np.zeros(1, np.int64), 8, {}, None
        self.places_of = {}  # by place the tokens that are asked for, those that are written, and whether it is scored

    def give(self, forced, schema):
        self.schema = schema

    def needs(self, length, *, logits, adapter):
        kinds = {logits, *(one[2] for one in self.places_of.values())}
        return self.needs_of(length, length, self.slots if self.places_of else 8, kinds, adapter)

    def needs_of(self, source, length, slots, logits, adapter=None):
        table = self.schema and self.schema.table.moves.shape
        steps = [Steps(self.strategy, self.places, length, slots, one, table) for one in logits]
        keys = [("encode", source), *steps]
        return {key: self.make for key in keys if key not in self.compiled and key[1] is not None}

    @staticmethod
    def make():
        FakeBatch.made += 1

    def add(self, ids, sampling, *, log_probs, row_tokens, adapter):
        if not self.places_of:
            self.slots = 8
        place = min({*range(self.places)} - self.places_of.keys())
        self.length = len(ids)
        self.places_of[place] = [3 * len(ids), 0, log_probs or sampling.temperature > 0]
        return place

    def drop(self, place):
        del self.places_of[place]

    @property
    def fullest(self):
        return max(self.places_of, key=lambda place: self.places_of[place][1])

    def advance(self, most, *, often):
        time.sleep(0.002)
        self.lacks = {}
        if max(one[1] for one in self.places_of.values()) == self.slots == 8:
            self.lacks = self.needs_of(None, self.length, 64, {one[2] for one in self.places_of.values()})
            self.slots = 8 if self.lacks else 64
        if not self.lacks:
            for one in self.places_of.values():
                one[1] += 1
        counts = np.asarray([self.places_of.get(place, (0, 0))[1] for place in range(self.places)])
        tokens = np.tile(np.arange(99) % 9 + 2, (self.places, 1, 1))
        scores = np.zeros(tokens.shape, np.float32)
        decoded = Decoded(tokens=tokens, lengths=counts[:, None], steps=counts, truncated=0 * counts, log_probs=scores)
        wanted = np.asarray([self.places_of.get(place, (0, 0))[0] for place in range(self.places)])
        return decoded, counts >= wanted

    def steps_for(self, tokens, taken):
        return tokens

    new_tokens = RunningBatch.new_tokens


@pytest.fixture
def fake(generator, monkeypatch):
    """An engine whose batches compile nothing, but ask for it."""
    monkeypatch.setattr("pipejax.apps.serving.engine.RunningBatch", FakeBatch)
    monkeypatch.setattr(FakeBatch, "made", 0)
    engine = Engine(generator, places=2, queue=9)
    yield engine
    engine.close(drain=False, seconds=1)


def plain(length, strategy="sequential", **more):
    return request(0, [*[5] * (length - 1), 1], strategy, **{"log_probs": False, **more})


def schema_of(asked):
    usual = dataclasses.replace(schema_lib.usual(MORE_WORDS.vocab_size), spelled=[b""] * MORE_WORDS.vocab_size)
    return dataclasses.replace(asked, source=asked.source._replace(schema=usual))


@pytest.mark.parametrize("new", [plain(2, log_probs=True), plain(2, temperature=1.0), plain(1), plain(2, "pipelined")])
def test_the_others_go_on(fake, new):
    """Alone and beside others, whatever the one that waits has that is new."""
    for answers in ([plain(2)], [plain(2)] * 3):
        for answer in [fake.submit(one) for one in answers]:
            assert len(record_in(answer)["row_ids"][0]) == 6
    held = Held(fake)
    waits = fake.submit(new)
    wait_until(lambda: held.kept)
    for _ in range(3):
        assert record_in(fake.submit(plain(2)))["truncated"] is None
    assert (fake.waiting, fake.running) == (1, 0) and len(held.kept) == 1
    held.let_go()
    assert len(record_in(waits)["row_ids"][0]) == 3 * len(new.source.content) and not waits.awaits


TABLE = "a schema of a new shape (512 kinds of tokens, 1024 states)"
FIRST = "the first request for pipelined decoding and a prompt of 1 tokens"
LARGER = "an answer that needs a larger cache (64 tokens)"


@pytest.mark.parametrize(
    ("new", "causes"),
    [
        (plain(1), ["a prompt of 1 tokens"]),
        (plain(2, log_probs=True), ["sampling or scores"]),
        (plain(2, temperature=1.0), ["sampling or scores"]),
        (plain(1, temperature=1.0), ["a prompt of 1 tokens and sampling or scores"]),
        (plain(1, "pipelined"), [FIRST]),
        (plain(9), ["a prompt of 9 tokens", LARGER]),
        (plain(9, log_probs=True), ["a prompt of 9 tokens and sampling or scores", LARGER]),
        (
            schema_of(plain(2, "pipelined")),
            [f"the first request for pipelined decoding and a prompt of 2 tokens and {TABLE}"],
        ),
    ],
)
def test_the_log_says_why_something_is_compiled(fake, new, causes, caplog):
    """Once for each cause, and not for what is compiled already."""
    record_in(fake.submit(plain(2)))
    with caplog.at_level("INFO", logger="pipejax"):
        logging.getLogger("pipejax.apps.serving.engine").addHandler(caplog.handler)
        for _ in range(2):
            record_in(fake.submit(new))
        logging.getLogger("pipejax.apps.serving.engine").removeHandler(caplog.handler)
    said = [*dict.fromkeys(record.getMessage() for record in caplog.records)]
    assert said == [f"compiling because of {cause}: a request waits for it, others go on" for cause in causes]


def test_a_new_combination_is_named_by_its_parts(fake):
    for key in (steps_key(fake, 2, True, None), steps_key(fake, 1, False, None)):
        fake.compiler.compiled[key] = True
    answer = fake.submit(plain(1, temperature=1.0))
    assert fake._causes(answer, {steps_key(fake, 1, True, None): print}) == [
        "a prompt of 1 tokens",
        "sampling or scores",
    ]
    assert fake._causes(answer, {("encode", 1): print}) == ["a prompt of 1 tokens"]
    record_in(answer)


def steps_key(engine, length, logits, table):
    return Steps(plain_kind(engine).strategy, 1, length, 8, logits, table)


def test_the_cache_grows_while_others_go_on(fake):
    """The one that outgrew it tells each token once, begins again behind nobody, and keeps its bound."""
    record_in(fake.submit(plain(2)))
    for answer in [fake.submit(plain(2)) for _ in range(3)]:
        record_in(answer)
    for places in (1, 2):  # of the prompt of 9 tokens all but its larger cache is there
        for key, make in (
            FakeBatch(None, plain_kind(fake).strategy, places, None, None, {}).needs_of(9, 9, 8, {False}).items()
        ):
            make()
            fake.compiler.compiled[key] = True
    held = Held(fake)
    long, cut = fake.submit(plain(9)), fake.submit(plain(9, max_tokens=20))
    wait_until(lambda: len(held.kept) == 2 and fake.running == 0)
    assert fake.waiting == 2 and record_in(fake.submit(plain(2)))["row_ids"]
    held.let_go()
    for answer, count in ((long, 27), (cut, 20)):
        *tokens, record = answer.events()
        assert [event.token for event in tokens] == (np.arange(count) % 9 + 2).tolist() == record["row_ids"][0]
        assert record["truncated"] == ("max_tokens" if count == 20 else None)


def plain_kind(engine):
    return engine._kind(engine.generator, "sequential")


def test_one_that_is_alone_takes_the_batch_that_is_there(fake):
    """And waits for neither, when one of them is."""
    for places, kept in ((2, 1), (1, 1)):
        wanted = FakeBatch(None, plain_kind(fake).strategy, places, None, None, {}).needs_of(kept, kept, 8, {False})
        fake.compiler.ask(wanted)
        wait_until(lambda wanted=wanted: not wanted.keys() - fake.compiler.compiled.keys())
        fake.compiler.compiled["weights"] = True
        held = Held(fake)
        assert record_in(fake.submit(plain(kept)))["row_ids"] and not held.kept
        held.let_go()


def test_what_a_warm_up_plans(fake):
    """All lengths and caches of both batches; first what answers every prompt."""
    orders, ask = {}, fake.compiler.ask

    def note(needs, order=WANTED):
        orders.setdefault(order, set()).update(needs)
        ask(needs, order)

    fake.compiler.ask = note
    fake.warm_up(70)
    wait_until(lambda: fake.compiler.prepared == fake.compiler.planned and not fake.compiler._asked.qsize())
    lengths = {64: {16, 24, 32, 48, 64}, 128: {96}}
    steps = {order: {key[1:5] for key in keys if isinstance(key, Steps)} for order, keys in orders.items()}
    kinds = [(m, kind) for m in lengths for kind in (False, True)]
    assert steps[PLANNED] == {(2, m, 8, kind) for m, kind in kinds}
    assert steps[LATER] == {(1, m, 8, kind) for m, kind in kinds}
    assert steps[LAST] == {(places, m, 64, kind) for places in (1, 2) for m, kind in kinds}
    assert {key[1] for key in orders[PLANNED] if key[0] == "encode"} == {n for own in lengths.values() for n in own}
    assert {"weights", "plan"} <= orders[PLANNED] and FakeBatch.made == len(fake.compiler.compiled) - 2


def test_plain_answers_of_all_lengths_are_compiled_before_scores(fake):
    asked = []
    fake.compiler.ask = lambda needs, order=WANTED: asked.extend((key, order) for key in needs)
    fake._plan(70, False)
    kinds = [key.logits for key, order in asked if isinstance(key, Steps) and order == PLANNED]
    assert kinds == sorted(kinds) and {*kinds} == {False, True}


@pytest.mark.parametrize(
    ("compiled", "places"),
    [
        ([], 1),  # nothing: the batch for one alone
        ([("encode", 3)], 1),
        ([("encode", 3), 2], 2),
        ([2], 2),  # the shared one lacks the encoder alone
        ([1], 1),
        ([1, 2], 1),
    ],
)
def test_a_request_waits_for_the_batch_that_lacks_less(fake, monkeypatch, compiled, places):
    kind = plain_kind(fake)
    keys = [Steps(kind.strategy, one, 3, 8, False, None) if isinstance(one, int) else one for one in compiled]
    fake.compiler.compiled.update(dict.fromkeys(["weights", *keys], True))
    seen, held = [], Held(fake)
    chosen = fake._choose
    monkeypatch.setattr(fake, "_choose", lambda answer: (seen.append(chosen(answer)), seen[-1])[1])
    answer = fake.submit(plain(3))
    wait_until(lambda: seen)
    assert seen[0][0].places == places
    held.let_go()
    record_in(answer)


@pytest.mark.parametrize(("places", "widens"), [(1, False), (2, True)])
def test_a_place_alone_is_never_widened(generator, places, widens):
    """No other source joins it, so no program for that is compiled."""
    batch = RunningBatch(generator.programs, generator.make_strategy("sequential"), places)
    found, find = [], batch._find

    def note(name, *given, **static):
        found.append(name)
        return find(name, *given, **static)

    batch._find = note
    batch._compile_room(2 * memory_length(1), None)
    assert ("widen" in found) == widens and "empty" in found


def scripted(generator, monkeypatch):
    """An engine whose weights are laid out and whose compiler is held."""
    engine = Engine(generator, places=1, queue=9)
    engine.compiler.compiled["weights"] = True
    return engine, Held(engine)


def test_who_leaves_while_it_waits_for_its_programs_is_gone_at_once(generator, monkeypatch):
    engine, held = scripted(generator, monkeypatch)
    answers = [engine.submit(request(i, [5, 1])) for i in range(3)]
    wait_until(lambda: len(held.kept) >= 3)
    answers[1].cancel()
    with pytest.raises(Closed):
        list(answers[1].events())
    assert engine.waiting == 2
    engine.close(drain=False, seconds=0)  # which waits for no compiler
    for answer in (answers[0], answers[2]):
        with pytest.raises(Closed):
            list(answer.events())
    assert engine.waiting == engine.running == 0


def test_a_compilation_that_fails_is_told_to_those_who_wait_for_it(generator, monkeypatch):
    engine, held = scripted(generator, monkeypatch)
    lost = [engine.submit(request(i, [5, 1])) for i in range(2)]
    other = engine.submit(request(0, [5, 1], "sequential"))
    wait_until(lambda: len(held.kept) == 3)

    def fail():
        raise MemoryError("too little for a program")

    held.ask({key: fail for key in held.kept[0] if isinstance(key, Steps)})  # the encoder is everybody's
    for answer in lost:
        with pytest.raises(MemoryError, match="for a program"):
            list(answer.events())
    assert (engine.failed, engine.waiting, bool(other.awaits)) == (2, 1, True)
    engine.close(drain=False, seconds=0)


@pytest.mark.parametrize("error", [MemoryError("little"), RuntimeError("RESOURCE_EXHAUSTED: little"), ValueError("no")])
def test_what_nobody_uses_is_given_up_where_a_compilation_lacked_memory(fake, monkeypatch, error):
    cleared = []
    monkeypatch.setattr(fake.encodings, "clear", lambda: cleared.append(True))
    record_in(fake.submit(plain(2)))
    kept, held = [*fake._batches.values()], Held(fake)
    lost = fake.submit(plain(9))
    wait_until(lambda: held.kept)

    def fail():
        raise error

    held.ask({next(iter(held.kept[0])): fail})
    with pytest.raises(type(error), match=str(error)):
        list(lost.events())
    held.let_go()
    record_in(fake.submit(plain(2)))
    lacked = not isinstance(error, ValueError)
    assert cleared == [True] * lacked and all((batch in fake._batches.values()) != lacked for batch in kept)


@pytest.mark.parametrize("how", ["by itself", "on the way", "for another reason"])
def test_nothing_of_a_failed_compilation_stays(how):
    """Neither in the thread that waits for the next, nor by the error that others were told."""

    class Array:
        pass

    left, told = [], []

    def deeper(array):
        raise MemoryError("little")

    def fail():
        array = Array()
        left.append(weakref.ref(array))
        try:
            deeper(array)
        except MemoryError as error:
            if how == "by itself":
                raise
            raise RuntimeError("no program") from (error if how == "on the way" else None)

    compiler = Compiler(lambda key, error: told.append(error))
    gc.disable()
    try:
        compiler.ask({"bad": fail})
        wait_until(lambda: told and not left[0]())
    finally:
        gc.enable()
        compiler.close()
    assert str(told[0]) in ("little", "no program")


def test_the_compiler_takes_what_is_waited_for_first():
    done, begun, go_on = [], threading.Event(), threading.Event()
    compiler = Compiler(lambda key, error: done.append((key, error is None)))
    compiler.ask({"first": lambda: (begun.set(), go_on.wait(20))}, PLANNED)
    begun.wait(20)

    def fail():
        raise ValueError("no")

    for order, key in ((LAST, "last"), (LATER, "later"), (PLANNED, "planned"), (WANTED, "wanted"), (WANTED, "first")):
        compiler.ask({key: lambda: None}, order)
    compiler.ask({"bad": fail}, PLANNED)
    assert (compiler.planned, compiler.prepared) == (3, 0)
    go_on.set()
    wait_until(lambda: len(done) == 7)
    assert [key for key, _ in done] == ["first", "wanted", "first", "planned", "bad", "later", "last"]
    assert [key for key, fine in done if not fine] == ["bad"] and "bad" not in compiler.compiled
    assert compiler.prepared == 2  # the bad one is not there, so nobody is told that all is
    compiler.ask({"slow": lambda: time.sleep(0.2)})
    compiler.close()
    compiler.close()  # as a server does whose time to drain runs out
    compiler.ask({"late": lambda: done.append("late")})
    wait_until(lambda: not compiler.thread.is_alive())
    assert [key for key, _ in done[7:]] in ([], ["slow"])


@pytest.mark.slow
def test_after_the_warm_up_nobody_waits_for_a_compiler(generator):
    """Sources of all lengths up to the longest, alone and together, scored or drawn or neither."""
    engine = Engine(generator, places=2, queue=9)
    engine.warm_up(70)
    wait_until(lambda: not engine.compiler._asked.qsize() and engine.compiler.prepared == engine.compiler.planned, 120)
    held = Held(engine)
    for lengths in ([3], [70], [20, 70], [70, 40, 3]):
        for more in ({"log_probs": False}, {}, {"log_probs": False, "temperature": 1.0}):
            answers = [engine.submit(request(0, [*[5] * (n - 1), 1], **more)) for n in lengths]
            assert all(map(record_in, answers))
    assert not held.kept
    engine.close(drain=True, seconds=60)
