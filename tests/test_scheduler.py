"""The scheduler step by step, without threads: batches that decode nothing, and a compiler that tests control."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from pipejax.apps.schemas import row_schema as schema_lib
from pipejax.apps.serving.answer import Answer, Closed, Event, Full, Kind, Request, kind_of
from pipejax.apps.serving.compile_log import causes_of
from pipejax.apps.serving.compiler import LAST, LATER, PLANNED, WANTED
from pipejax.apps.serving.scheduler import WEIGHTS, Scheduler
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding import Decoded, Sampling
from pipejax.inference.decoding_options import Constraints
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import RunningBatch, StepKind, Steps
from pipejax.inference.sources import Source
from pipejax.system.compiled import CompiledPrograms, Needs
from support import oracle
from support.tiny import MORE_WORDS


class FakeBatch:
    """Writes three tokens for each token of a source, one token in a step; each token takes a slot of the cache."""

    cache_sizes, has_drafts, made = (8, 64), False, 0

    def __init__(
        self, programs: Any, strategy: Any, places: int, switch: Any, encodings: Any, compiled: Mapping[Any, Any]
    ) -> None:
        self.strategy, self.places, self.compiled = strategy, places, compiled
        self.starts, self.slots = np.zeros(1, np.int64), 8
        self.answer_format: Any = None
        self.lacks: Needs = {}
        # By place the number of wanted tokens, of written tokens, and whether they are scored.
        self.places_of = dict[int, list[Any]]()

    def give(self, constraints: Constraints) -> None:
        self.answer_format = constraints.answer_format

    def needs(self, length: int, *, kind: StepKind, adapter: Any) -> Needs:
        kinds = {kind, *(one[2] for one in self.places_of.values())}
        return self.needs_of(length, length, self.slots if self.places_of else 8, kinds)

    def needs_of(self, source: int | None, length: int, slots: int, kinds: set[StepKind], adapter: Any = None) -> Needs:
        label = self.answer_format.program_label if self.answer_format else ""
        steps = [Steps(self.strategy, self.places, length, slots, one, label) for one in kinds]
        keys = [("encode", source), *steps]
        return {key: self.make for key in keys if key not in self.compiled and key[1] is not None}

    @staticmethod
    def make() -> None:
        FakeBatch.made += 1

    def add(self, ids: Any, sampling: Sampling, *, log_probs: bool, row_tokens: Any, adapter: Any) -> int:
        if not self.places_of:
            self.slots = 8
        place = min({*range(self.places)} - self.places_of.keys())
        self.length = len(ids)
        self.places_of[place] = [3 * len(ids), 0, StepKind.of(sampling, log_probs)]
        return place

    def drop(self, place: int) -> None:
        del self.places_of[place]

    @property
    def fullest(self) -> int:
        return max(self.places_of, key=lambda place: self.places_of[place][1])

    def advance(self, most: int, *, often: bool) -> tuple[Decoded, np.ndarray]:
        self.lacks = {}
        if max(one[1] for one in self.places_of.values()) == self.slots == 8:
            self.lacks = self.needs_of(None, self.length, 64, {one[2] for one in self.places_of.values()})
            self.slots = 8 if self.lacks else 64
        if not self.lacks:
            for one in self.places_of.values():
                one[1] += 1
        counts: Any = np.asarray([self.places_of.get(place, (0, 0))[1] for place in range(self.places)])
        tokens: Any = np.tile(np.arange(99) % 9 + 2, (self.places, 1, 1))
        scores: Any = np.zeros(tokens.shape, np.float32)
        decoded = Decoded(tokens=tokens, lengths=counts[:, None], steps=counts, truncated=0 * counts, log_probs=scores)
        wanted = np.asarray([self.places_of.get(place, (0, 0))[0] for place in range(self.places)])
        return decoded, counts >= wanted

    def steps_for(self, tokens: int, taken: int) -> int:
        return tokens

    new_tokens: Any = RunningBatch.new_tokens


class ManualCompiler:
    """Compiles the requested programs when a test calls `run`: programs that requests wait for come first."""

    def __init__(self) -> None:
        self.compiled = CompiledPrograms()
        self.asked = list[tuple[int, Any, Callable[[], object]]]()

    def ask(self, needs: Needs, order: int = WANTED) -> None:
        self.asked += [(order, key, make) for key, make in needs.items()]

    def run(self, tell: Callable[[Any, Exception | None], None]) -> None:
        """Makes steps until the clients have their answers."""
        while self.asked:
            self.asked.sort(key=lambda one: one[0])
            _, key, make = self.asked.pop(0)
            self.compiled.find(key, make)
            tell(key, None)


class Client:
    """A request, and the results that its reader has received."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.found = answer, list[Any]()
        answer.listen(self.found.extend)

    @property
    def is_answered(self) -> bool:
        return bool(self.found) and not isinstance(self.found[-1], Event)

    @property
    def record(self) -> Any:
        assert isinstance(self.found[-1], dict), self.found[-1:]
        return self.found[-1]


class Served(Scheduler):
    """A scheduler with a compiler that waits for the test."""

    compiler: ManualCompiler

    def __init__(self, generator: Generator, *, places: int = 2, queue: int = 9) -> None:
        super().__init__(generator, ManualCompiler(), places=places, queue=queue)

    def submit(self, *requests: Request) -> list[Client]:
        clients = [Client(self.answer(request)) for request in requests]
        for client in clients:
            self.add(client.answer)
        return clients

    def run(self, *clients: Client, compiles: bool = True) -> None:
        """Steps until the clients have their answers."""
        for _ in range(200):
            if compiles:
                self.compiler.run(self.met)
            self.step()
            if all(client.is_answered for client in clients):
                return
        raise AssertionError("a client waits in vain")

    def records(self, *requests: Request, compiles: bool = True) -> list[Any]:
        clients = self.submit(*requests)
        self.run(*clients, compiles=compiles)
        return [client.record for client in clients]

    @property
    def kind(self) -> Kind:
        return kind_of(self.generator, "sequential")

    def batch(self, places: int) -> FakeBatch:
        return FakeBatch(None, self.kind.strategy, places, None, None, {})

    def steps_key(self, length: int, kind: StepKind, places: int = 1) -> Steps:
        return Steps(self.kind.strategy, places, length, 8, kind, "")


@pytest.fixture(scope="module")
def generator() -> Generator:
    config = Config(
        model=MORE_WORDS,
        grid=GridConfig(delay=2, time_max=16, sub_max=5),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(max_length=30, scores=True),
    )
    return Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)


@pytest.fixture
def scheduler(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr("pipejax.apps.serving.lanes.RunningBatch", FakeBatch)
    monkeypatch.setattr(FakeBatch, "made", 0)
    made = Served(generator)
    yield made
    made.close()
    assert (len(made.waiting), made.lanes.running) == (0, 0)


def plain(length: int, strategy: str = "sequential", **more: Any) -> Request:
    sampling = Sampling(temperature=more.pop("temperature", 0.0))
    return Request(Source(0, [*[5] * (length - 1), 1]), strategy, sampling, **{"log_probs": False, **more})


def schema_of(request: Request) -> Request:
    size = MORE_WORDS.vocab_size
    usual = dataclasses.replace(schema_lib.Schemas().usual(size), spelled=[b""] * size)
    return dataclasses.replace(request, source=request.source._replace(answer_format=usual))


def test_requests_are_admitted_and_answered_in_the_order_of_arrival(scheduler: Served) -> None:
    scheduler.records(plain(2), plain(2))  # programs for one place and for two are compiled
    clients = scheduler.submit(*[plain(2)] * 5)
    order = list[int]()
    for _ in range(18):
        scheduler.step()
        assert scheduler.lanes.running <= 2
        order += [i for i, client in enumerate(clients) if client.is_answered and i not in order]
    assert order == [0, 1, 2, 3, 4]
    assert [len(client.found) for client in clients] == [7] * 5  # six tokens and the record
    assert (scheduler.answered, scheduler.failed, scheduler.tokens) == (7, 0, 42)


def test_each_step_delivers_its_tokens(scheduler: Served) -> None:
    scheduler.records(plain(2))
    (client,) = scheduler.submit(plain(2))
    for count in range(1, 6):
        scheduler.step()
        assert [event.token for event in client.found] == [*range(2, 2 + count)]
    assert scheduler.has_work
    scheduler.step()
    assert client.record["row_ids"] == [[2, 3, 4, 5, 6, 7]] and not scheduler.has_work


def test_queue_limit_excludes_requests_with_free_places(generator: Generator) -> None:
    scheduler = Served(generator, places=2, queue=3)
    scheduler.submit(*[plain(2)] * 5)  # two of them can have a place
    with pytest.raises(Full, match="5 requests wait"):
        scheduler.submit(plain(2))
    assert len(scheduler.waiting) == 5
    scheduler.close()
    assert scheduler.failed == 5


def test_cancelled_requests_leave_at_the_next_step(scheduler: Served) -> None:
    scheduler.records(plain(2), plain(2))
    clients = scheduler.submit(*[plain(2)] * 4)
    scheduler.step()
    for client in (clients[0], clients[3]):  # one runs, the other waits
        client.answer.cancel()
    scheduler.step()
    assert [len(client.found) for client in clients] == [2, 2, 1, 1]  # the place of the first went to the third
    assert all(isinstance(clients[i].found[-1], Closed) for i in (0, 3))
    scheduler.run(*clients)
    assert clients[1].record["row_ids"] == clients[2].record["row_ids"]


def test_close_fails_running_and_waiting_requests(scheduler: Served) -> None:
    scheduler.records(plain(2), plain(2))
    clients = scheduler.submit(*[plain(2)] * 3)
    scheduler.step()
    scheduler.close()
    assert [type(client.found[-1]) for client in clients] == [Closed] * 3 and scheduler.failed == 3


def test_failed_step_fails_running_requests_only(scheduler: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler.records(plain(2), plain(2))
    clients = scheduler.submit(*[plain(2)] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(FakeBatch, "advance", lambda self, most, often: 1 / 0)
        scheduler.step()
    assert [type(client.found[-1]) for client in clients[:2]] == [ZeroDivisionError] * 2
    scheduler.run(clients[2])
    assert clients[2].record["truncated"] is None and (scheduler.failed, scheduler.answered) == (2, 3)


# Programs that are compiled while requests wait.


@pytest.mark.parametrize("new", [plain(2, log_probs=True), plain(2, temperature=1.0), plain(1), plain(2, "pipelined")])
def test_others_continue_while_a_request_waits_for_its_programs(scheduler: Served, new: Request) -> None:
    scheduler.records(plain(2))
    scheduler.records(*[plain(2)] * 3)
    (waits,) = scheduler.submit(new)
    for _ in range(3):
        (record,) = scheduler.records(plain(2), compiles=False)
        assert record["truncated"] is None and len(record["row_ids"][0]) == 6
    assert (len(scheduler.waiting), scheduler.lanes.running) == (1, 0)
    asked = [key for _, key, _ in scheduler.compiler.asked]
    assert len(asked) == len({*asked}) and {*asked} == waits.answer.awaits != set()  # requested once
    scheduler.run(waits)
    assert len(waits.record["row_ids"][0]) == 3 * len(new.source.content) and not waits.answer.awaits


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
def test_log_has_a_line_for_each_cause_of_compilation(
    scheduler: Served, new: Request, causes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """There is one line for each cause, and none for compiled programs."""
    scheduler.records(plain(2))
    own = logging.getLogger("pipejax.apps.serving.compile_log")
    with caplog.at_level("INFO", logger="pipejax"):
        own.addHandler(caplog.handler)
        caplog.clear()  # the line of the first request, if this process logs at level INFO
        for _ in range(2):
            scheduler.records(new)
        own.removeHandler(caplog.handler)
    lines = [*dict.fromkeys(record.getMessage() for record in caplog.records)]
    assert lines == [f"compiling because of {cause}; one request waits, others continue" for cause in causes]


def test_new_combination_is_named_by_its_parts(scheduler: Served) -> None:
    known = [scheduler.steps_key(2, StepKind.LOGITS), scheduler.steps_key(1, StepKind.TOKENS)]
    answer = scheduler.answer(plain(1, temperature=1.0))
    both = causes_of(answer, {scheduler.steps_key(1, StepKind.LOGITS): print}, known)
    assert both == ["a prompt of 1 tokens", "sampling or scores"]
    assert causes_of(answer, {("encode", 1): print}, known) == ["a prompt of 1 tokens"]


def test_cache_grows_while_others_continue(scheduler: Served) -> None:
    """A request that outgrew the cache gets each token once, starts again before all others, and keeps its bound."""
    scheduler.records(plain(2))
    scheduler.records(*[plain(2)] * 3)
    for places in (1, 2):  # all programs for the prompt of 9 tokens, but not its larger cache
        scheduler.compiler.compiled |= dict.fromkeys(scheduler.batch(places).needs_of(9, 9, 8, {StepKind.TOKENS}), True)
    long, cut = scheduler.submit(plain(9), plain(9, max_tokens=20))
    for _ in range(12):
        scheduler.step()
    assert (len(scheduler.waiting), scheduler.lanes.running) == (2, 0)
    assert scheduler.records(plain(2), compiles=False)[0]["row_ids"]
    scheduler.run(long, cut)
    for client, count in ((long, 27), (cut, 20)):
        *tokens, record = client.found
        assert [event.token for event in tokens] == (np.arange(count) % 9 + 2).tolist() == record["row_ids"][0]
        assert record["truncated"] == ("max_tokens" if count == 20 else None)


@pytest.mark.parametrize(("places", "length"), [(2, 1), (1, 1)])
def test_single_request_uses_the_compiled_batch(scheduler: Served, places: int, length: int) -> None:
    compiled = scheduler.batch(places).needs_of(length, length, 8, {StepKind.TOKENS})
    scheduler.compiler.compiled |= dict.fromkeys([WEIGHTS, *compiled], True)
    assert scheduler.records(plain(length), compiles=False)[0]["row_ids"] and not scheduler.compiler.asked


@pytest.mark.parametrize(
    ("compiled", "places"),
    [
        ([], 1),  # nothing is compiled: the batch for one
        ([("encode", 3)], 1),
        ([("encode", 3), 2], 2),
        ([2], 2),  # the shared batch lacks only the encoder
        ([1], 1),
        ([1, 2], 1),
    ],
)
def test_request_waits_for_the_batch_that_lacks_fewer_programs(
    scheduler: Served, compiled: list[Any], places: int
) -> None:
    keys = [scheduler.steps_key(3, StepKind.TOKENS, places=one) if isinstance(one, int) else one for one in compiled]
    scheduler.compiler.compiled |= dict.fromkeys([WEIGHTS, *keys], True)
    lane, needs = scheduler.choose(scheduler.answer(plain(3)))
    wanted = {("encode", 3), scheduler.steps_key(3, StepKind.TOKENS, places=places)} - {*keys}
    assert lane.places == places and needs.keys() == wanted


@pytest.mark.parametrize("error", [MemoryError("little"), RuntimeError("RESOURCE_EXHAUSTED: little"), ValueError("no")])
def test_unused_memory_is_freed_after_a_compilation_lacked_memory(
    scheduler: Served, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    cleared = list[bool]()
    monkeypatch.setattr(scheduler.encodings, "clear", lambda: cleared.append(True))
    scheduler.records(plain(2))
    kept = [*scheduler.lanes.batches.values()]
    (lost,) = scheduler.submit(plain(9))
    scheduler.step()
    scheduler.met(scheduler.compiler.asked[0][1], error)
    assert lost.found == [error] and not scheduler.waiting and scheduler.failed == 1
    scheduler.records(plain(2))
    lacked = not isinstance(error, ValueError)
    assert cleared == [True] * lacked
    assert all((batch in scheduler.lanes.batches.values()) != lacked for batch in kept)


# The programs that a warm-up plans.


def test_warm_up_plans_all_lengths_and_caches_of_both_batches(scheduler: Served) -> None:
    """Programs that answer every prompt are first."""
    asked = list[tuple[int, Any]]()
    ask = scheduler.compiler.ask

    def note(needs: Needs, order: int = WANTED) -> None:
        asked.extend((order, key) for key in needs)
        ask(needs, order)

    scheduler.compiler.ask = note  # type: ignore[method-assign]
    scheduler.warm_up(70)
    scheduler.compiler.run(scheduler.met)
    lengths = {64: {16, 24, 32, 48, 64}, 128: {96}}
    orders = {order: {key for o, key in asked if o == order} for order, _ in asked}
    steps = {order: {key[1:5] for key in keys if isinstance(key, Steps)} for order, keys in orders.items()}
    kinds = [(m, kind) for m in lengths for kind in (StepKind.TOKENS, StepKind.LOGITS)]
    assert steps[PLANNED] == {(2, m, 8, kind) for m, kind in kinds}
    assert steps[LATER] == {(1, m, 8, kind) for m, kind in kinds}
    assert steps[LAST] == {(places, m, 64, kind) for places in (1, 2) for m, kind in kinds}
    assert {key[1] for key in orders[PLANNED] if key[0] == "encode"} == {n for own in lengths.values() for n in own}
    assert {WEIGHTS, "plan"} <= orders[PLANNED] and FakeBatch.made == len(scheduler.compiler.compiled) - 2


def test_plain_answers_of_all_lengths_are_planned_before_scores(scheduler: Served) -> None:
    scheduler.plan(70)
    kinds = [key.kind for order, key, _ in scheduler.compiler.asked if isinstance(key, Steps) and order == PLANNED]
    assert kinds == sorted(kinds) and {*kinds} == {StepKind.TOKENS, StepKind.LOGITS}
