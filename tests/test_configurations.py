"""Configurations of decoding on a GPU: their trial, its fallbacks, and results that keep their places in memory.

A CPU stands for the GPU in tests of the whole decoder. XLA's compilers for GPUs show that loops are in CUDA graphs.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding import Decoded, Pipelined
from pipejax.inference import configurations, programs
from pipejax.inference.configurations import CONFIGURATIONS, DEFAULT, Configuration, ConfigurationTable, DecodeShape
from pipejax.inference.generator import Generator
from pipejax.inference.report import Report
from pipejax.system import compile_cache, trials
from pipejax.system.errors import UserError
from support import oracle
from support.tiny import MORE_WORDS

GRAPH, ONE_STEP, NO_KERNELS = Configuration(graph=True), Configuration(steps=1), Configuration(kernels=False)
ALL = GRAPH, ONE_STEP, NO_KERNELS
SHORT, LONG = DecodeShape("kind", 64, "short"), DecodeShape("kind", 128, "long")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of compiled programs, on a machine with an H200."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv(compile_cache.VARIABLE, str(directory))
    monkeypatch.setattr(trials, "gpus", lambda: trials.Gpus(("NVIDIA H200",), "575.57.08"))
    return directory


def decoded(token: int = 5, garbage: int = 0, **fields: Any) -> Decoded:
    """Two rows, one of two tokens and one empty."""
    tokens = [[[token, 6, garbage], [garbage] * 3]]
    own: dict[str, Any] = {"tokens": tokens, "lengths": [[2, 0]], "steps": [4], "truncated": [0]} | fields
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in own.items()}
    return Decoded(**arrays)


class Device:
    """A device that decodes in a given time for each configuration, and counts the decodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **milliseconds: float) -> None:
        self.times = milliseconds
        self.results: dict[Configuration, Decoded | Exception] = {}
        self.count: Counter[Configuration] = Counter()
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __call__(self, configuration: Configuration) -> Decoded:
        self.count[configuration] += 1
        changed = (ms for name, ms in self.times.items() if getattr(configuration, name) != getattr(DEFAULT, name))
        self.now += (10 + sum(changed)) / 1e3
        found = self.results.get(configuration, decoded())
        if isinstance(found, Exception):
            raise found
        return found


def test_the_fastest_configuration_is_chosen_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Changes that save time are kept and combined; a later process starts with the verdict."""
    device = Device(monkeypatch, graph=-4, steps=2, kernels=-1)
    chosen, table, report = Configuration(graph=True, kernels=False), ConfigurationTable(), Report()
    assert table.find(SHORT) == DEFAULT
    for _ in range(3):
        assert table.decode(SHORT, ALL, device, report).tokens[0, 0, 0] == 5
    assert table.find(SHORT) == chosen and device.count[chosen] == 1 + configurations.ROUNDS + 2
    assert device.count[Configuration(graph=True, steps=1)] == 1 + configurations.ROUNDS and device.count[ONE_STEP] == 0
    [line] = [line for line in said if line.startswith("decoding configuration")]
    assert line.startswith(
        f"decoding configuration: {chosen} (10.00 ms a decode with {DEFAULT}, 6.00 ms with {GRAPH}; "
    )
    device.count.clear()
    other = ConfigurationTable()
    assert other.find(SHORT) == chosen
    for _ in range(2):
        other.decode(SHORT, ALL, device, Report())
    assert device.count == {chosen: 2}
    assert said[-1] == f"decoding configuration: {chosen} (an earlier trial; pipejax trials lists all)"
    assert len(said) == 2


def test_the_time_of_a_trial_counts_as_compilation(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the first decode, whose result is returned, does not."""
    device, report = Device(monkeypatch, graph=5), Report(compile_seconds=100)
    ConfigurationTable().decode(SHORT, (GRAPH,), device, report)
    assert report.compile_seconds == pytest.approx(100 + (15 + configurations.ROUNDS * (10 + 15)) / 1e3)


def test_configuration_with_a_small_gain_is_not_chosen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ConfigurationTable()
    table.decode(SHORT, ALL, Device(monkeypatch, graph=-0.1), Report())
    assert table.find(SHORT) == DEFAULT


def test_configuration_with_other_tokens_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """The slow configuration is kept. Tokens after the end of a row are not compared."""
    device, table = Device(monkeypatch, graph=-5, steps=-5), ConfigurationTable()
    device.results = {GRAPH: decoded(7), ONE_STEP: decoded(garbage=9)}
    table.decode(SHORT, (GRAPH, ONE_STEP), device, Report())
    assert table.find(SHORT) == ONE_STEP and device.count[GRAPH] == 1
    assert f"warning: decoding with {DEFAULT}, because {GRAPH} gives other tokens" in said
    for other in (decoded(lengths=[[1, 0]]), decoded(steps=[5]), decoded(truncated=[1])):
        assert not configurations._are_same(other, decoded())
    assert configurations._are_same(decoded(garbage=3), decoded())


@pytest.mark.parametrize("text, kept", [("cannot capture", True), ("RESOURCE_EXHAUSTED: out of memory", False)])
def test_a_configuration_that_fails_in_its_trial_is_not_used(
    text: str, kept: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, table = Device(monkeypatch, graph=-5), ConfigurationTable()
    device.results[GRAPH] = RuntimeError(text)
    assert table.decode(SHORT, (GRAPH,), device, Report()).tokens[0, 0, 0] == 5
    assert table.find(SHORT) == DEFAULT and (cache / "verdicts").exists() == kept


def test_a_chosen_configuration_that_fails_later_is_replaced(
    cache: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """For example, a larger cache cannot be compiled with it; the verdict is removed."""
    device = Device(monkeypatch, graph=-5)
    for table in (
        ConfigurationTable(),
        ConfigurationTable(),
    ):  # the first makes the trial, the second reads the verdict
        device.results.clear()
        table.decode(SHORT, (GRAPH,), device, Report())
        device.results[GRAPH] = RuntimeError("cannot capture")
        device.count.clear()
        for _ in range(2):
            assert table.decode(SHORT, (GRAPH,), device, Report()).tokens[0, 0, 0] == 5
        assert device.count == {GRAPH: 1, DEFAULT: 2} and table.find(SHORT) == DEFAULT
        assert [*(cache / "verdicts").iterdir()] == []
    wanted = (
        f"warning: decoding configuration: {GRAPH} failed (RuntimeError: cannot capture); {DEFAULT} is used from now on"
    )
    assert said.count(wanted) == 2


def test_errors_of_all_configurations_reach_the_caller(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, table = Device(monkeypatch, graph=-5), ConfigurationTable()
    device.results[DEFAULT] = RuntimeError("the device is lost")
    with pytest.raises(RuntimeError, match="lost"):
        table.decode(SHORT, (GRAPH,), device, Report())
    device.results.clear()
    table.decode(SHORT, (GRAPH,), device, Report())
    device.results[GRAPH] = UserError("slots", found="full")
    with pytest.raises(UserError):
        table.decode(SHORT, (GRAPH,), device, Report())
    assert table.find(SHORT) == GRAPH


def test_another_length_is_compared_only_with_the_last_verdict(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, table = Device(monkeypatch, graph=-4, kernels=-1), ConfigurationTable()
    chosen = Configuration(graph=True, kernels=False)
    table.decode(SHORT, ALL, device, Report())
    device.count.clear()
    table.decode(LONG, ALL, device, Report())
    assert (
        device.count == {DEFAULT: 1 + configurations.ROUNDS, chosen: 1 + configurations.ROUNDS}
        and table.find(LONG) == chosen
    )
    device.count.clear()
    slow = ConfigurationTable()
    monkeypatch.setenv(compile_cache.VARIABLE, "off")
    for size in (SHORT, LONG):
        slow.decode(size, (ONE_STEP,), device, Report())
    assert device.count == {DEFAULT: 1 + configurations.ROUNDS + 1, ONE_STEP: 1 + configurations.ROUNDS}


def test_a_fixed_configuration_is_not_compared(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    ConfigurationTable(GRAPH).decode(SHORT, ALL, device, Report())
    assert device.count == {GRAPH: 1} and not (cache / "verdicts").exists()


def test_every_combination_has_a_name() -> None:
    assert len(CONFIGURATIONS) == 8 and CONFIGURATIONS[str(DEFAULT)] == DEFAULT
    assert all(str(configuration) == name for name, configuration in CONFIGURATIONS.items())


def test_flags_of_users_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configurations.changes(steps=4, kernels=True) == ALL
    assert configurations.changes(steps=1, kernels=False) == (GRAPH,)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert configurations.changes(steps=4, kernels=True) == (ONE_STEP, NO_KERNELS)


CONFIG = Config(
    model=MORE_WORDS,
    grid=GridConfig(delay=1, time_max=10, sub_max=4),
    decode=DecodeConfig(),
    train=TrainConfig(method="pipelined"),
)
SOURCES = [[3, 5, 7, 4, 1], [9, 8, 1], [2, 3, 4, 5, 6, 7, 8, 9, 1], [6, 1]]


def generator(**options: Any) -> Generator:
    return Generator(CONFIG, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None, **options)


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU decode as a GPU does, in caches that grow."""
    monkeypatch.setattr(programs, "SLOTS", (16, 24, 4000))
    monkeypatch.setattr(programs, "QUERY_COUNTS", ())
    monkeypatch.setitem(programs.ITERATION_STEPS, "cpu", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, fixed",
    [
        ({}, (None, GRAPH, ONE_STEP)),
        ({"temperature": 0.7, "seed": 3}, (None,)),
        pytest.param({"draft": "source"}, (None, GRAPH), marks=pytest.mark.long),
    ],
)
def test_a_device_with_several_configurations_decodes_the_same(
    settings: dict[str, Any],
    fixed: tuple[Configuration | None, ...],
    cache: Path,
    as_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of two sizes are decoded repeatedly in all configurations, with results in place of earlier ones."""
    with monkeypatch.context() as patch:
        patch.delitem(programs.ITERATION_STEPS, "cpu")
        plain = generator()
        expected = [plain.decode(SOURCES[:n], batch_size=2, **settings) for n in (3, 1)]
    for configuration in fixed:
        made = generator()
        made.programs.configurations.fixed = configuration
        for n, records in zip((3, 1, 3, 1), expected * 2, strict=True):
            assert made.decode(SOURCES[:n], batch_size=2, **settings) == records
    kept = [*(cache / "verdicts").glob("*.json")]
    assert bool(kept) == ("temperature" not in settings)


def addresses(tree: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


@pytest.mark.slow
def test_results_keep_their_addresses(as_gpu: None, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of the encoder and of the first program keep them; a greedy decode moves only the source."""
    made = generator(devices=jax.devices()[:2])
    made.programs.configurations.fixed = DEFAULT
    texts = SOURCES[:2] * 2
    expected = made.decode(texts, batch_size=2)
    before = {name: addresses(tree) for name, (_, tree) in made.programs._results.items()}
    assert {*before} == {"encoder", "decoder"} and all(before.values())
    for program in (p for p in made.programs._compiled.values() if len(p.args_info[0]) == 6):
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == pytest.approx(memory.output_size_in_bytes, abs=4096)
    for _ in range(3):
        assert made.decode(texts, batch_size=2) == expected
        assert {name: addresses(tree) for name, (_, tree) in made.programs._results.items()} == before
    made.decode(SOURCES[2:3], batch_size=1)
    assert len(made.programs._results) == 2
    made.programs.forget_params()
    assert not made.programs._results


@pytest.mark.slow
def test_large_results_are_allocated_again(as_gpu: None, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "REUSED", 0)
    made = generator()
    made.programs.configurations.fixed = DEFAULT
    assert made.decode(SOURCES[:1]) == made.decode(SOURCES[:1]) and not made.programs._results


@pytest.mark.slow
def test_programs_of_other_configurations_are_freed(as_gpu: None, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only programs for the same shape are freed; a program that samples has only one configuration, and is kept."""
    made = generator()
    made.decode(SOURCES[:1], temperature=0.5)
    sampled = {*made.programs._compiled}
    monkeypatch.setattr(configurations, "GAIN", 1e9)
    made.decode(SOURCES[:1])
    fastest = Configuration(graph=True, steps=1)
    table: dict[Any, Any] = made.programs._compiled
    found = {key: key[-1] for key in table if key not in sampled}
    assert found and {*found.values()} == {fastest} and sampled <= {*table}
    compiled = made.warm_up([5], batch_sizes=(1,)).shapes
    strategy: Any = made.make_strategy()
    assert isinstance(strategy, Pipelined)
    assert compiled == len({key for key in table if key not in sampled}) - len(found)
