"""A running batch of number memories: sources that join, its compiled programs, and a cache that grows."""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding.drafters import FromModel
from pipejax.inference.batch_programs import BatchPrograms
from pipejax.inference.drafter_parameters import OpenDrafter
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import RunningBatch
from pipejax.system.errors import UserError
from pipejax.testing.recomputation import TOY
from support import oracle
from support.tiny import MORE_WORDS

LENGTHS = (64, 128, 256, 512)  # of memories


@pytest.fixture(scope="module")
def generator() -> Generator:
    config = Config(model=MORE_WORDS, train=TrainConfig(method="sequential"), decode=DecodeConfig(max_length=2000))
    return Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)


@pytest.fixture
def batch(generator: Generator) -> RunningBatch:
    """A batch with two places."""
    strategy: Any = generator.make_strategy("sequential")
    return RunningBatch(generator.programs, strategy, 2)


@pytest.fixture
def programs(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> BatchPrograms:
    """The programs of two places, whose sources and carries are only lengths."""
    strategy: Any = generator.make_strategy("sequential")
    made = BatchPrograms(generator.programs, strategy, 2)
    monkeypatch.setattr(made, "shape_of_source", lambda length, adapter: of(length))
    return made


def of(length: int) -> Any:
    return SimpleNamespace(length=length)


@dataclasses.dataclass
class NoCarry:
    """A carry without rules, for scripted steps."""

    states: tuple[()] = ()


class Calls:
    """The called programs, by name and by the lengths of their inputs and outputs."""

    def __init__(self) -> None:
        self.made = set[tuple[Any, ...]]()

    def __call__(self, name: str, *given: Any, **static: Any) -> Any:
        lengths = [x.length for x in given if isinstance(x, SimpleNamespace)]
        self.made.add((name, *lengths, *static.items()))
        if name == "empty":
            return of(lengths[0]), of(0)
        assert name in ("widen", "place"), name
        return of(static["slots"] if name == "widen" else lengths[0])


@pytest.mark.parametrize("own, one", [*itertools.product(LENGTHS, LENGTHS)])
def test_joining_memories_are_padded_to_the_longer(programs: BatchPrograms, own: int, one: int) -> None:
    call = Calls()
    encoded, _, joined = programs.join(call, of(own), of(0), of(one))
    assert encoded.length == joined.length == max(own, one)
    assert {made[1] for made in call.made} == {n for n in LENGTHS if min(own, one) <= n < max(own, one)}


@pytest.mark.parametrize("length", LENGTHS)
def test_programs_for_joining_sources_are_compiled_ahead(
    programs: BatchPrograms, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, called = Calls(), Calls()
    monkeypatch.setattr(programs, "find", compiled)
    programs.compile_room(length, None)
    for own, one in itertools.product(LENGTHS, LENGTHS):
        if max(own, one) == length:
            encoded, carry, _ = programs.join(called, None, None, of(own))
            encoded, _, joined = programs.join(called, encoded, carry, of(one))
            programs.place(called, encoded, joined, 1)
    assert called.made == compiled.made


def test_cache_is_full_only_at_its_largest_size(batch: RunningBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, seen = batch.cache_sizes, list[int]()
    assert len(sizes) > 2
    needed = sizes[-1]  # slots, for a step

    def step(*given: Any) -> Any:
        seen.append(batch._slots)
        return None, np.zeros(2, bool), np.int32(0 if batch._slots >= needed else 5), NoCarry()

    monkeypatch.setattr(BatchPrograms, "step", step)
    monkeypatch.setattr(BatchPrograms, "grow", lambda self, call, encoded, carry, slots: carry)
    batch._encoded, batch._carry, batch._slots, batch._in_use[0] = of(64), cast(Any, NoCarry()), sizes[0], True
    assert batch._run_steps(5)[2] == 5 and seen == [*sizes]
    needed = sizes[-1] + 1
    with pytest.raises(
        UserError, match=f"^slots: found a cache of {sizes[-1]} slots, which is full before all examples are finished"
    ):
        batch._run_steps(5)


# A small T5 that drafts.

SHARP = dataclasses.replace(TOY, num_decoder_layers=3)


@pytest.fixture(scope="module")
def drafted() -> Generator:
    """A generator whose small T5 is the model itself, so that nearly all of its drafts are correct."""
    config = Config(
        model=SHARP,
        grid=GridConfig(time_max=16, sub_max=3),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(draft="model", draft_checkpoint="given", draft_tokens=4),
    )
    # Larger weights give sharper probabilities, so that long drafts are worth their columns.
    params = jax.tree.map(lambda x: 3 * x, SHARP.init_params(jax.random.key(3)))
    drafter = OpenDrafter(FromModel(least=0.0), config=config, params=params)
    return Generator(config, params, None, drafter=drafter)


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 2])
def test_drafts_of_a_small_t5_do_not_depend_on_former_answers(drafted: Generator, places: int) -> None:
    """Answers of a running batch take no more calls than answers of new batches of the same size."""
    rng = np.random.default_rng(0)
    given = [rng.integers(2, 60, 12).tolist() for _ in range(6)]
    records = drafted.decode(given, method="pipelined", batch_size=places)
    strategy = cast(Any, drafted.make_strategy("pipelined"))
    batch, calls, waiting, of = RunningBatch(drafted.programs, strategy, places), {}, [*range(6)], dict[int, int]()
    while waiting or of:
        while waiting and batch.free:
            number = waiting.pop(0)
            of[batch.add(given[number])] = number
        decoded, done = batch.advance()
        for place in [place for place in of if done[place]]:
            assert decoded.calls is not None
            calls[of.pop(place)] = int(decoded.calls[place])
            batch.drop(place)
    expected = [record["calls"] for record in records]
    assert sum(calls.values()) <= sum(expected) < sum(record["steps"] for record in records)
    if places == 1:
        assert [calls[i] for i in range(6)] == expected
