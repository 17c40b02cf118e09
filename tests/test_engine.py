"""The engine: each answer equals decoding its source alone, with any other requests at the same time."""

import dataclasses
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import support.foreign_drafters
from pipejax import checkpoint
from pipejax.apps.serving.answer import Closed, Event, Full, Request
from pipejax.apps.serving.compiler import LAST, LATER, PLANNED, WANTED, Compiler
from pipejax.apps.serving.engine import Engine
from pipejax.apps.teach.students import initial_params
from pipejax.checkpoint.student import STUDENT
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.data.shapes import memory_length
from pipejax.decoding import Sampling
from pipejax.inference import programs
from pipejax.inference.batch_programs import BatchPrograms
from pipejax.inference.encodings import Encodings
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import RunningBatch, StepKind, Steps, Switch
from pipejax.inference.sources import Source
from pipejax.kernels.backends import OwnKernel
from pipejax.system.compiled import CompiledPrograms
from pipejax.system.errors import UserError
from support import oracle
from support.served import wait_until, wait_until_compiled
from support.tiny import MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def generator():
    config = Config(
        model=MORE_WORDS,
        grid=GridConfig(delay=2, time_max=16, sub_max=5),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(max_length=30, scores=True),
    )
    return Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)


@pytest.fixture(scope="module")
def fast(kernel):
    """A generator for the CPU kernel; its answers have no end, since eos is never the most likely token."""
    sizes = dataclasses.replace(MORE_WORDS, vocab_size=300, d_model=32, d_kv=16, d_ff=32)
    config = Config(model=sizes, train=TrainConfig(method="sequential"), decode=DecodeConfig(max_length=1_000_000))
    params = oracle.random_params(sizes, np.random.default_rng(4))
    params = {**params, "shared": {"embedding": jax.numpy.asarray(params["shared"]["embedding"]).at[1].set(0.0)}}
    return Generator(config, params, None, backend=OwnKernel("auto", kernel))


def texts(count):
    rng = np.random.default_rng(count)
    return [[*rng.integers(2, 12, rng.choice([3, 20, 70])).tolist(), 1] for _ in range(count)]


def request(i, ids, strategy="pipelined", **more):
    names = [field.name for field in dataclasses.fields(Sampling)]
    chosen = {name: more.pop(name) for name in names if name in more}
    return Request(Source(i, ids), strategy, Sampling(**chosen), **more)


def assert_same(found, expected):
    scores = ("log_prob", "log_probs")
    assert {k: v for k, v in found.items() if k not in scores} == {k: v for k, v in expected.items() if k not in scores}
    assert found["log_prob"] == pytest.approx(expected["log_prob"], abs=1e-3)
    for a, b in zip(found["log_probs"], expected["log_probs"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


@pytest.mark.slow
def test_answers_equal_answers_decoded_alone(generator):
    """Both methods have many more requests than places, sources of all lengths, and a cache that grows."""
    given = texts(20)
    engine = Engine(generator, places=3, queue=100)
    names = ["pipelined" if i % 3 else "sequential" for i in range(len(given))]
    answers = [engine.submit(request(i, ids, name)) for i, (ids, name) in enumerate(zip(given, names, strict=True))]
    found = [[] for _ in answers]
    answers[0].listen(found[0].extend)
    for i in range(2, len(answers)):
        found[i] = list(answers[i].events())
    engine.close(drain=True, seconds=60)
    answers[1].listen(found[1].extend)  # the whole answer has arrived
    assert (engine.scheduler.answered, engine.scheduler.failed, engine.running, engine.waiting) == (20, 0, 0, 0)
    expected = {name: generator.decode(given, method=name, batch_size=1) for name in {*names}}
    for i, (events, name) in enumerate(zip(found, names, strict=True)):
        *tokens, record = events
        assert_same(record, expected[name][i])
        rows = [[event.token for event in tokens if event.row == r] for r in range(5)]
        assert [row for row in rows if row] == [row for row in record["row_ids"] if row]
        assert all(isinstance(event, Event) for event in tokens)
        if name == "pipelined":  # tokens of a step are sent before tokens of a later step
            seen, times = [0] * 5, []
            for event in tokens:
                times.append(2 * event.row + seen[event.row])
                seen[event.row] += 1
            assert times == sorted(times)


@pytest.mark.slow
def test_requests_against_repetition_do_not_change_other_answers(generator):
    """Each request has its settings; a request without them is answered as if the others had none."""
    given = texts(6)
    settings = [{}, {"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1, "repetition_penalty": 1.5}]
    engine = Engine(generator, places=3, queue=100)
    pairs = [(ids, more) for ids in given for more in settings]
    answers = [engine.submit(request(i, ids, **more)) for i, (ids, more) in enumerate(pairs)]
    found = [list(answer.events())[-1] for answer in answers]
    engine.close(drain=True, seconds=60)
    changed = 0
    for (ids, more), record in zip(pairs, found, strict=True):
        (expected,) = generator.decode([ids], method="pipelined", **more)
        assert record["row_ids"] == expected["row_ids"] and record["steps"] == expected["steps"]
        changed += record["row_ids"] != found[pairs.index((ids, {}))]["row_ids"]
    assert changed > 3


FOREIGN = ["support.foreign_drafters:Ranked", "support.foreign_drafters:RankedOnce"]


@pytest.fixture(
    params=[
        "source",
        "shared encoder",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("jacobi", "model")),
        *(pytest.param(name, marks=[] if name.endswith("RankedOnce") else pytest.mark.long) for name in FOREIGN),
    ]
)
def drafting(request, generator, tmp_path):
    """The generator with drafts of each kind."""
    assert support.foreign_drafters, "its module is imported"
    small = dataclasses.replace(MORE_WORDS, d_model=12, num_heads=3)
    params = oracle.random_params(small, np.random.default_rng(7))
    large = oracle.random_params(MORE_WORDS, np.random.default_rng(4))
    draft = request.param
    if draft == "shared encoder":
        draft, small = "model", dataclasses.replace(MORE_WORDS, num_decoder_layers=1)
        params = initial_params(large, [1])
    checkpoint.save_params(tmp_path / "small", dataclasses.replace(generator.config, model=small), params)
    if request.param == "shared encoder":
        (tmp_path / "small" / STUDENT).write_text('{"encoder_fp": "any"}')
    own = {"draft": draft, "draft_tokens": 3}
    if request.param in FOREIGN:
        np.save(tmp_path / "small" / "vector.npy", np.random.default_rng(3).standard_normal(16).astype(np.float32))
    own |= {"draft_checkpoint": str(tmp_path / "small")} if draft in ("model", *FOREIGN) else {}
    config = dataclasses.replace(generator.config, decode=dataclasses.replace(generator.config.decode, **own))
    return Generator(config, large, None)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipelined", pytest.param("sequential", marks=pytest.mark.long)])
def test_drafts_keep_answers_and_reduce_calls(generator, drafting, strategy):
    """Sources of several lengths join and leave, so that drafters get longer sources during an answer."""
    given = texts(9)
    expected, drafted = (one.decode(given, method=strategy, batch_size=1) for one in (generator, drafting))
    engine = Engine(drafting, places=3, queue=99)
    sampled = [request(100 + i, ids, strategy, temperature=0.7, seed=i) for i, ids in enumerate(given[:3])]
    few = [request(200 + i, ids, strategy, max_tokens=4) for i, ids in enumerate(given[:3])]
    # Drafts may be correct up to the end in the call that generates the last requested token.
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
        if wanted["truncated"] != "max_tokens":  # decoding continues until a pause shows that there are enough tokens
            assert record["calls"] <= wanted["calls"]
            saved += wanted["calls"] - record["calls"]
        if i in undrafted:  # the same tokens in the same order
            tokens = [(event.row, event.token) for event in events]
            assert tokens == [(event.row, event.token) for event in undrafted[i][:-1]]
    saves = sum(one["calls"] for one in drafted) < sum(one["calls"] for one in expected)
    assert saves or (strategy, drafting.config.decode.draft) == (
        "sequential",
        "source",
    )  # answers of this method copy nothing from their sources
    assert saved > 0 or not saves


@pytest.mark.slow
def test_64_clients_get_the_drafted_answers_of_offline_decoding(generator, drafting):
    """Each client waits for its answer in a thread, so that requests join and leave a batch in any order."""
    given = texts(64)
    plain, offline = (one.decode(given, method="pipelined", batch_size=8) for one in (generator, drafting))
    engine = Engine(drafting, places=8, queue=64)
    with ThreadPoolExecutor(64) as clients:
        answers = [
            clients.submit(lambda i=i: list(engine.submit(request(i, given[i])).events())[-1]) for i in range(64)
        ]
        found = [answer.result(timeout=300) for answer in answers]
    engine.close(drain=True, seconds=60)
    for i, (record, one, other) in enumerate(zip(found, plain, offline, strict=True)):
        assert_same({**record, "calls": 0}, {**one, "calls": 0, "id": i})
        assert record["calls"] <= one["calls"] and record["row_ids"] == other["row_ids"]


@pytest.mark.slow
def test_a_longer_source_joins_a_grown_cache_without_compiling(monkeypatch):
    monkeypatch.setattr(programs, "SLOTS", (6,))
    config = Config(
        model=MORE_WORDS,
        grid=GridConfig(delay=1, time_max=24, sub_max=2),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(draft="source", draft_tokens=1),
    )
    made = Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)
    compiled = CompiledPrograms()
    batch = RunningBatch(made.programs, made.make_strategy("pipelined"), 2, compiled=compiled)

    def meet(needs):
        for key, make in needs.items():
            compiled.find(key, make)

    rng = np.random.default_rng(0)
    short, longer = ([*rng.integers(2, 12, length).tolist(), 1] for length in (20, 70))
    meet(batch.needs(len(short), kind=StepKind.TOKENS, adapter=None))
    place = batch.add(short, log_probs=False)
    while not batch.lacks:
        assert not batch.advance(1)[1][place], "the answer is too short for its cache to grow"
    meet(batch.lacks)
    batch.advance(1)
    meet(batch.needs(len(longer), kind=StepKind.TOKENS, adapter=None))
    known = {*compiled}
    batch.add(longer, log_probs=False)
    batch.advance(1)
    assert {*compiled} == known


@pytest.mark.slow
def test_samples_depend_on_the_seed_only(generator):
    """The other requests in the batch have no effect, and greedy requests stay greedy."""
    ids = texts(1)[0]
    engine = Engine(generator, places=4, queue=100)
    given = [request(0, ids, temperature=1.0, seed=seed, top_k=9, top_p=0.95, min_p=0.01) for seed in (1, 2, 1)]
    answers = [engine.submit(x) for x in [*given, request(0, ids)]]
    one, two, again, greedy = (list(answer.events())[-1] for answer in answers)
    engine.close(drain=False, seconds=60)
    assert one["row_ids"] == again["row_ids"] != two["row_ids"]
    assert greedy["row_ids"] == generator.decode([ids])[0]["row_ids"]


@pytest.mark.slow
def test_answers_to_a_source_that_was_just_encoded(generator):
    """Answers to repeated and simultaneous sources equal decoding; the encoder reads each source once."""
    given = [[5, 6, 7, 1], [8, 9, 1], [2, 3, 4, 5, 6, 1]]
    expected = generator.decode(given, method="sequential", batch_size=1)
    engine = Engine(generator, places=2, queue=9, encodings=2)
    counts = []
    for turn in ([0], [0], [1], [0], [2, 0], [1]):  # two are kept, so 2 removes 1
        answers = [engine.submit(request(i, given[i], "sequential")) for i in turn]
        for i, answer in zip(turn, answers, strict=True):
            assert_same(list(answer.events())[-1], expected[i])
        counts.append((engine.scheduler.encodings.hits, engine.scheduler.encodings.misses))
    engine.close(drain=True, seconds=60)
    assert counts == [(0, 1), (1, 1), (1, 2), (2, 2), (3, 3), (3, 4)]


@pytest.mark.slow
def test_kernel_does_not_change_an_encoding(fast):
    engine, ids = Engine(fast, places=2, queue=5, encodings=4), texts(3)
    engine.warm_up(4)
    wait_until(lambda: engine.compiler.prepared == engine.compiler.planned)
    assert engine.scheduler.encodings.misses == engine.scheduler.encodings.bytes == 0
    found = [
        list(engine.submit(request(i, ids[i], "sequential", max_tokens=20)).events())[:-1] for i in (0, 1, 2, 0, 1)
    ]
    assert (engine.scheduler.encodings.hits, engine.scheduler.encodings.misses) == (2, 3)
    engine.close(drain=True, seconds=60)
    assert found[3:] == found[:2] and all(len(tokens) == 20 for tokens in found)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_latest_encodings_are_kept(most):
    """Compared with plain lists of the latest requests; equal ids with another adapter are another source."""
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


def test_waiting_request_fails_if_no_batch_can_be_made(generator, monkeypatch):
    """The cause is a lack of memory, for example; the next request tries again."""

    def fails(*given, **more):
        raise MemoryError("no room for a batch")

    engine = Engine(generator, places=2, queue=4)
    with monkeypatch.context() as patch:
        patch.setattr("pipejax.apps.serving.lanes.RunningBatch", fails)
        with pytest.raises(MemoryError, match="no room"):
            list(engine.submit(request(0, [3, 1])).events())
    assert (engine.waiting, engine.running) == (0, 0)
    assert isinstance(list(engine.submit(request(0, [3, 1])).events())[-1], dict)
    engine.close(drain=False, seconds=60)


@pytest.mark.slow
def test_requests_have_a_batch_for_themselves_or_share_one(generator):
    """A single request gets its own batch, unless the last one had others; simultaneous requests share."""
    engine, given = Engine(generator, places=3, queue=9), [request(i, ids) for i, ids in enumerate(texts(6))]

    def lanes(requests):
        with engine.scheduler.waiting.lock:  # the requests arrive together
            answers = [engine.submit(one) for one in requests]
        for answer in answers:
            list(answer.events())
        return {
            lane.places: batch for lane, batch in engine.scheduler.lanes.batches.items() if batch._encoded is not None
        }

    assert set(lanes(given[:1])) == {1}
    assert set(lanes(given[:3])) == {1, 3}
    wide = engine.scheduler.lanes.batches.pop(next(lane for lane in engine.scheduler.lanes.batches if lane.places == 3))
    assert wide.places == 3 and set(lanes(given[:1])) == {1, 3}  # another request may join, as before
    engine.close(drain=False, seconds=60)


def test_steps_before_a_pause_can_give_enough_tokens(generator):
    """In step t at most the rows that start by then are open; a sequential answer grows by a token in a step."""
    grid = RunningBatch(generator.programs, generator.make_strategy("pipelined"), 1)
    line = RunningBatch(generator.programs, generator.make_strategy("sequential"), 1)
    for taken in (0, 1, 5, 16, 40):
        for tokens in range(1, 60):
            grown = steps = 0
            while grown < tokens:
                grown += sum(2 * row <= taken + steps for row in range(5))
                steps += 1
            assert grid.steps_for(tokens, taken) == steps and line.steps_for(tokens, taken) == tokens
    assert line.steps_for(10**6, 0) == 10**6 > grid.steps_for(10**6, 0) > 10**6 // 5  # computed in no time


@pytest.mark.slow
def test_answer_ends_after_max_tokens(generator):
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


def test_full_queue_and_closed_engine_refuse_requests(generator):
    given = texts(6)
    engine = Engine(generator, places=1, queue=2)
    with engine.scheduler.waiting.lock:  # the engine sees the requests only after all have arrived
        answers = [engine.submit(request(i, given[i])) for i in range(3)]
        with pytest.raises(Full):
            engine.submit(request(3, given[3]))
        answers[1].cancel()
    last = list(answers[2].events())[-1]
    assert_same(last, {**generator.decode([given[2]])[0], "id": 2})
    with pytest.raises(Closed):
        list(answers[1].events())
    assert engine.scheduler.answered == 2
    engine.close(drain=True, seconds=60)
    with pytest.raises(Closed):
        engine.submit(request(4, given[4]))


def test_settings_that_an_engine_lacks_are_refused(generator):
    for key, value, strategy in (("limit", "source", "pipelined"), ("beams", 2, "sequential")):
        decode = DecodeConfig(max_length=30, **{key: value})
        config = dataclasses.replace(generator.config, decode=decode, train=TrainConfig(method=strategy))
        other = Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)
        with pytest.raises(UserError, match=f"decode.{key}: found"):
            Engine(other, places=1, queue=1)


def test_set_switch_pauses_the_engine_after_a_step(fast):
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
    steps = batch.advance(often=False)[0].steps[place]  # without the interruption it would take minutes
    assert 59 < steps < 100_000
    thrower.join()


def test_listening_has_no_side_effects(fast):
    """JAX calls a program with effects in Python, array by array, and a stream calls one for each read."""
    given = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((2,), np.uint32)
    assert not jax.make_jaxpr(fast.programs.backend.listen)(*given).effects


def test_new_request_does_not_wait_for_a_long_answer(fast):
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


def test_engine_reports_a_failure_and_continues(generator, monkeypatch):
    given = texts(2)
    engine = Engine(generator, places=2, queue=5)
    with monkeypatch.context() as patch:
        patch.setattr("pipejax.inference.running_batch.RunningBatch.advance", lambda self, most, often: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(engine.submit(request(0, given[0])).events())
    assert_same(list(engine.submit(request(0, given[0])).events())[-1], generator.decode([given[0]])[0])
    assert engine.scheduler.failed == 1
    engine.close(drain=True, seconds=60)


# The background compiler.


class Held:
    """Holds back an engine's requests to its compiler until `let_go`."""

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
@pytest.mark.parametrize("other", ["length", "method", "scores", "temperature"])
def test_other_requests_run_while_one_waits_for_compilation(generator, other):
    """This holds for any kind of new program; answers equal decoding."""
    engine, short = Engine(generator, places=2, queue=9), [5, 6, 7, 1]
    for _ in range(2):  # alone and together
        for answer in [engine.submit(request(0, short, log_probs=False)) for _ in range(2)]:
            record_in(answer)
    held, ids, more = Held(engine), short, {"log_probs": False}
    strategy = "sequential" if other == "method" else "pipelined"
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
        assert found["row_ids"] == generator.decode([ids], method=strategy)[0]["row_ids"]
    engine.close(drain=True, seconds=60)


@pytest.mark.slow
def test_answer_that_outgrows_its_cache_restarts_in_a_larger_one(generator, monkeypatch):
    """It restarts when the larger cache exists: no token is sent twice, and all equal decoding."""
    given = texts(4)
    decoded = generator.decode(given, batch_size=1)
    monkeypatch.setattr("pipejax.inference.programs.SLOTS", (8, 24))
    engine = Engine(generator, places=1, queue=9)
    events = [[] for _ in given]
    for answer, found in zip([engine.submit(request(i, ids)) for i, ids in enumerate(given)], events, strict=True):
        found += answer.events()
    assert engine.scheduler.failed == 0 and engine.scheduler.answered == len(given)
    engine.close(drain=True, seconds=60)
    sizes = {key.slots for key in engine.compiler.compiled if isinstance(key, Steps)}
    assert len(sizes) > 1 and min(sizes) == 8  # some requests were postponed
    for (*tokens, record), expected in zip(events, decoded, strict=True):
        assert_same(record, {**expected, "id": record["id"]})
        rows = [[event.token for event in tokens if event.row == r] for r in range(5)]
        assert [row for row in rows if row] == [row for row in record["row_ids"] if row]


@pytest.mark.parametrize(("places", "widens"), [(1, False), (2, True)])
def test_batch_of_one_place_is_never_widened(generator, places, widens):
    """No other source joins it, so no program for wider batches is compiled."""
    programs = BatchPrograms(generator.programs, generator.make_strategy("sequential"), places)
    found, find = [], programs.find

    def note(name, *given, **static):
        found.append(name)
        return find(name, *given, **static)

    programs.find = note
    programs.compile_room(2 * memory_length(1), None)
    assert ("widen" in found) == widens and "empty" in found


def scripted(generator, monkeypatch):
    """An engine whose weights are laid out and whose compiler is held."""
    engine = Engine(generator, places=1, queue=9)
    engine.compiler.compiled["weights"] = True
    return engine, Held(engine)


def test_request_cancelled_during_compilation_ends_at_once(generator, monkeypatch):
    engine, held = scripted(generator, monkeypatch)
    answers = [engine.submit(request(i, [5, 1])) for i in range(3)]
    wait_until(lambda: len(held.kept) >= 3)
    answers[1].cancel()
    with pytest.raises(Closed):
        list(answers[1].events())
    assert engine.waiting == 2
    engine.close(drain=False, seconds=0)  # closing waits for no compilation
    for answer in (answers[0], answers[2]):
        with pytest.raises(Closed):
            list(answer.events())
    assert engine.waiting == engine.running == 0


def test_failed_compilation_fails_its_waiting_requests(generator, monkeypatch):
    engine, held = scripted(generator, monkeypatch)
    lost = [engine.submit(request(i, [5, 1])) for i in range(2)]
    other = engine.submit(request(0, [5, 1], "sequential"))
    wait_until(lambda: len(held.kept) == 3)

    def fail():
        raise MemoryError("too little for a program")

    held.ask({key: fail for key in held.kept[0] if isinstance(key, Steps)})  # all requests share the encoder
    for answer in lost:
        with pytest.raises(MemoryError, match="for a program"):
            list(answer.events())
    assert (engine.scheduler.failed, engine.waiting, bool(other.awaits)) == (2, 1, True)
    engine.close(drain=False, seconds=0)


@pytest.mark.parametrize("how", ["by itself", "on the way", "for another reason"])
def test_failed_compilation_leaves_nothing(how):
    """References are left neither in the waiting thread nor in the error that other requests receive."""

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


def test_compiler_takes_awaited_programs_first():
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
    assert compiler.prepared == 2  # the bad program is absent, so the warm-up is not reported as complete
    compiler.ask({"slow": lambda: time.sleep(0.2)})
    compiler.close()
    compiler.close()  # like a server at the end of its time to drain
    compiler.ask({"late": lambda: done.append("late")})
    wait_until(lambda: not compiler.thread.is_alive())
    assert [key for key, _ in done[7:]] in ([], ["slow"])


@pytest.mark.slow
def test_no_request_waits_for_compilation_after_warm_up(generator):
    """Sources have all lengths up to the longest, alone and together, scored, sampled or neither."""
    engine = Engine(generator, places=2, queue=9)
    engine.warm_up(70)
    wait_until_compiled(engine)
    held = Held(engine)
    for lengths in ([3], [70], [20, 70], [70, 40, 3]):
        for more in ({"log_probs": False}, {}, {"log_probs": False, "temperature": 1.0}):
            answers = [engine.submit(request(0, [*[5] * (n - 1), 1], **more)) for n in lengths]
            assert all(map(record_in, answers))
    assert not held.kept
    engine.close(drain=True, seconds=60)
