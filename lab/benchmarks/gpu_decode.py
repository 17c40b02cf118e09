"""Parts of `lab.benchmarks.gpu` that measure decoding: the time of a step, and the time that steps do not change."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab import launch
from lab.benchmarks import profile
from lab.benchmarks import programs as counts
from lab.benchmarks.gpu import ROOT, Case, Result
from lab.benchmarks.profile import least
from lab.benchmarks.systems import SIZES, random_params
from lab.launch import trial
from pipejax import decoding
from pipejax.decoding import Pipelined, Sequential, Sizes
from pipejax.inference import configurations, programs
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.configurations import Configuration, ConfigurationTable
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.kernels.backends import Gpu
from pipejax.model.precision import precision
from pipejax.system import compile_cache

Array = jax.Array
BFLOAT16 = jnp.dtype(jnp.bfloat16)
LOOPS = configurations.GRAPH[configurations.COMMAND_BUFFERS]  # what XLA puts into a CUDA graph, with loops


class Decodes:
    """A T5 with random weights and one encoded source, for decodes whose answers have no end."""

    def __init__(self, rehearse: bool) -> None:
        """Draws the weights and encodes the source."""
        self.config, source = SIZES["tiny" if rehearse else "base"], 32 if rehearse else 512
        self.model, self.few, self.many = self.config.module(dtype=BFLOAT16), *((4, 8) if rehearse else (20, 44))
        self.params = random_params(self.config)
        self.source = np.random.default_rng(1).integers(3, self.config.vocab_size, (1, source), np.int32)
        self.own = Gpu(interpret=jax.default_backend() != "gpu")
        with precision(BFLOAT16):
            ready = jax.jit(partial(XLA.prepare, self.model))(self.params)
            encode = jax.jit(partial(programs.encode_batch, self.model))
            self.memory = encode(ready.encoding, self.source, np.asarray([source], np.int32))
        self.weights, self.tokens = ready.decoding, dict[int, Array]()

    def strategy(self, queries: int, steps: int = 64) -> Any:
        """A strategy whose answers have no end; `queries` is the number of rows."""
        return Sequential(steps, eos=10**6) if queries == 1 else Pipelined(1, steps, queries, eos=10**6)

    def case(self, name: str, backend: Backend, queries: int, steps: int, **options: Any) -> Case:
        """A case that calls `compile` with these arguments."""
        iteration = f"{steps} {'step' if steps == 1 else 'steps'} in an iteration"
        queries_ = f"{queries} {'query' if queries == 1 else 'queries'}"
        label = f"{name}, {queries_}, {iteration}"
        return Case(label, partial(self.compile, label, backend, queries, steps, **options))

    def compile(
        self,
        name: str,
        backend: Backend,
        queries: int,
        steps: int,
        *,
        graphs: str | None = None,
        blocks: launch.LaunchBlocks | None = None,
        keeps: bool = False,
    ) -> Callable[[], Result]:
        """Compiles a decode that pauses after a number of steps.

        Args:
          name: the name of the case.
          backend: computes the steps.
          queries: queries of a step.
          steps: steps in an iteration of the loop.
          graphs: what XLA may put into a CUDA graph; None: XLA's choice.
          blocks: blocks of the launch that decodes; None: XLA's loop decodes.
          keeps: whether the carry with the cache is returned as well.
        """
        strategy = self.strategy(queries)
        sizes = Sizes.fit(strategy, 1, slots=programs.SLOTS[1:], steps=steps)
        slots = next(x for x in sizes.slots if x >= (self.many + 1) * queries)

        def decode(weights: Any, memory: Any, pause_after: Array) -> Any:
            decoder = backend.decoder(self.model, weights, memory)
            carry = decoding.begin(strategy, decoder, strategy.init(1), sizes)
            given: Any = {"sizes": sizes, "slots": slots, "pause_after": pause_after}
            if blocks:
                found, failed, _ = launch.decode(decoder, strategy, carry, **given, blocks=blocks)
            else:
                found, failed = decoding.decode(strategy, decoder, carry, **given), jnp.bool_(False)
            return found.decoded, failed, found if keeps else None

        # The name of the directory must not change: it is part of the key in the cache of compiled programs.
        dump = (compile_cache.safe_directory() or Path("build")) / "thunks" / name.replace(" ", "_")
        options: dict[str, str | bool] = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
        options |= {} if graphs is None else {configurations.COMMAND_BUFFERS: graphs}
        with precision(BFLOAT16):
            lowered = jax.jit(decode).lower(self.weights, self.memory, jnp.int32(0))
            program = lowered.compile(compiler_options=options)

        def answer(count: int) -> tuple[Any, Any]:
            decoded, failed, _ = program(self.weights, self.memory, jnp.int32(count))
            found: tuple[Any, Any] = jax.device_get((decoded, failed))
            return found

        def measuring() -> Result:
            many, few = (least(partial(answer, count)) for count in (self.many, self.few))
            found = slope(self.few, few, self.many, many)
            decoded, failed = answer(self.many)
            real = np.arange(decoded.tokens.shape[2]) < decoded.lengths[..., None]
            first = self.tokens.setdefault(queries, decoded.tokens)
            found |= {"equal": float((decoded.tokens == first)[real].mean()), "host_loops": host_loops(dump)}
            if blocks:
                found["failed"] = bool(failed)
            elif graphs is None:
                found |= profile.try_profile(partial(answer, self.many))
                found["kernels_s"] = found["profile"]["busy_s"] / self.many if "profile" in found else None
            return found

        return measuring

    def compile_product(self, configuration: Configuration | None) -> Callable[[], Result]:
        """Compiles what `pipejax decode` compiles.

        Args:
          configuration: the configuration of decoding; None: the first decode compares all of them and chooses one.
        """
        found = Programs(self.config, BFLOAT16, devices=jax.local_devices()[:1], backend=self.own)
        found.set_params(self.params)
        found.configurations = ConfigurationTable(configuration)
        source, lengths = self.source[None], np.full((1, 1), self.source.size, np.int32)

        def call(count: int) -> None:
            strategy = self.strategy(9, count)
            decoded = found.decode(source[0].tolist(), strategy, batch_size=1, across=1, report=Report())
            assert decoded.steps.tolist() == [count], "an answer has ended"

        def encode() -> Any:
            return found._encode(found._run, self.strategy(9), source, lengths, None, Report())

        begun = time.perf_counter()
        call(self.many)
        more: Result = {"first_s": time.perf_counter() - begun}
        if configuration is None:
            # Without a GPU there is no choice.
            chosen = next(iter(found.configurations._chosen.values()), Configuration())
            found.configurations, more["configuration"] = ConfigurationTable(chosen), str(chosen)
        call(self.few)

        def measuring() -> Result:
            few, many, encoder = (least(call) for call in (partial(call, self.few), partial(call, self.many), encode))
            return slope(self.few, few - encoder, self.many, many - encoder) | {"encoder_s": encoder} | more

        return measuring


def slope(few: int, few_s: float, many: int, many_s: float) -> Result:
    """The seconds of a step, and those of a decode that do not depend on its steps."""
    step = (many_s - few_s) / (many - few)
    return {"step_s": step, "fixed_s": few_s - few * step}


def host_loops(dump: Path) -> int | None:
    """The number of loops that the host controls in the last program that was dumped; None: there is no dump.

    XLA writes the sequence of thunks again when it has put some of them into CUDA graphs.
    """
    lists = sorted(dump.glob("*.thunk_sequence*.txt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    return counts.count_thunks(lists[-1].read_text(encoding="utf-8")).loops if lists else None


def cases(rehearse: bool) -> list[Case]:
    """Steps of T5-Base in several configurations of CUDA graphs, with pipejax's kernels and with XLA's."""
    every = Decodes(rehearse)
    own = every.own
    found = [
        every.case("own kernels", own, 9, 4),
        every.case("own kernels, loops in the graph", own, 9, 4, graphs=LOOPS),
        every.case("own kernels, no graphs", own, 9, 4, graphs=""),
        every.case("XLA's kernels", XLA, 9, 4),
        every.case("XLA's kernels, loops in the graph", XLA, 9, 4, graphs=LOOPS),
        every.case("XLA's kernels", XLA, 1, 4),
        every.case("XLA's kernels, loops in the graph", XLA, 1, 4, graphs=LOOPS),
        every.case("own kernels, loops in the graph", own, 9, 1, graphs=LOOPS),
        every.case("own kernels, cache returned", own, 9, 4, keeps=True),
        Case("`pipejax decode`, 9 queries, its choice", partial(every.compile_product, None)),
        Case("`pipejax decode`, 9 queries, loops on the host", partial(every.compile_product, Configuration())),
        Case(
            "`pipejax decode`, 9 queries, loops in the graph", partial(every.compile_product, Configuration(graph=True))
        ),
        every.case("own kernels", own, 9, 1),
        every.case("own kernels", own, 20, 4),
    ]
    return [found[1], found[3], found[9]] if rehearse else found


def launch_cases(rehearse: bool) -> list[Case]:
    """A decode in one launch of a kernel (`lab.launch`), compared with XLA's kernels."""
    every, blocks = Decodes(rehearse), launch_blocks()

    def compare() -> Callable[[], Result]:
        given = partial(trial.compare, trial._decoder(), Pipelined(1, 12, 5), blocks, steps=7)
        program = jax.jit(given).lower().compile()

        def measuring() -> Result:
            failed, apart = jax.device_get(program())
            return {
                "failed": bool(failed),
                "apart": float(apart),
                "agrees": bool(not failed and apart < trial.TOLERANCE),
            }

        return measuring

    found = [Case("launch, logits", compare)]
    for queries in (9,) if rehearse else (9, 1, 20):
        found += [every.case("XLA's kernels", XLA, queries, 1), every.case("launch", XLA, queries, 1, blocks=blocks)]
    return found


def launch_blocks() -> launch.LaunchBlocks:
    """One block for each multiprocessor; without a GPU, threads of the CPU."""
    first = jax.local_devices()[0]
    if first.platform == "gpu":
        return launch.LaunchBlocks(first.core_count, str(first.compute_capability).replace(".", ""))
    from lab.launch import emulated

    directory = ROOT / "build" / "launch"
    directory.mkdir(parents=True, exist_ok=True)
    emulated.register(directory)
    return emulated.blocks()
