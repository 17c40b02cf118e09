"""What the parts of `lab.benchmarks.gpu` compile and measure; each is a process.

    python -m lab.benchmarks.gpu_parts NAME [--rehearse]

A part is a list of cases. All of them compile first, several at once; then each measures in a turn of its own.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lab import launch
from lab.benchmarks import agreement, graph, profile, steps
from lab.benchmarks.gpu import NO_GPU, PARTS, ROOT, Channel
from lab.benchmarks.peers import training as peer
from lab.benchmarks.peers.worker import error_line
from lab.benchmarks.systems import SIZES, random_params
from lab.launch import trial
from pipejax import config as config_lib
from pipejax import decoding
from pipejax.config import Config, T5Config
from pipejax.decoding import Pipelined, Sequential, Sizes
from pipejax.inference import programs
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.kernels import block_attention
from pipejax.kernels.backends import Gpu
from pipejax.model.attention import attend
from pipejax.model.layers import buckets
from pipejax.model.precision import precision
from pipejax.model.slots import Blocks, Distances, Seen, Slots
from pipejax.system import compile_cache
from pipejax.training import costs
from pipejax.training.memory import compiled_bytes, longest_batch, plan, stepper

Array = jax.Array
Result = dict[str, Any]
PATIENCE = 120.0  # seconds for which all cases wait for the slowest compilation; then the compiled ones measure
BFLOAT16 = jnp.dtype(jnp.bfloat16)
ARRAYS = ("output", "gradient of queries", "gradient of keys", "gradient of values", "gradient of the bias table")
VERSIONS = ("jax", "jaxlib", "flax", "numpy", "torch", "triton", "transformers")
# XLA's own choice contains neither WHILE nor CONDITIONAL. A compiler option takes whole lists only, not "+WHILE".
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
OPTION = "xla_gpu_enable_command_buffer"


class Case(NamedTuple):
    """A measurement: `compile` returns the function that measures."""

    name: str
    compile: Callable[[], Callable[[], Result | list[Result]]]
    timed: bool = True  # whether it needs a turn on the device


class Skipped(Exception):
    """A part that cannot run here."""


def main(argv: Sequence[str]) -> int:
    """Runs a part; the command line is `lab.benchmarks.gpu`'s."""
    name, rehearse = argv[0], "--rehearse" in argv
    channel = Channel(int(argv[-1]) if "--channel" in argv else None)
    builders: dict[str, Callable[[bool], list[Case]]] = {
        "train": lambda rehearse: training("base", rehearse, again=True),
        "attention": attention,
        "decode": decode,
        "launch": one_launch,
        "large": lambda rehearse: training("large", rehearse),
        "long": lambda rehearse: training("base", rehearse, source=16384),
        "auto": lambda rehearse: training("base", rehearse, "train.remat=auto"),
        "transformers": transformers,
        "graph": torch_graph,
        "agreement": agreements,
    }
    assert builders.keys() == {part.name for part in PARTS}
    if name in ("transformers", "graph"):
        jax.config.update("jax_platforms", "cpu")  # PyTorch has the device
    elif jax.default_backend() != "gpu" and not rehearse:
        print(f"found no GPU (JAX on {jax.default_backend()}); expected one, or --rehearse", file=sys.stderr)
        return NO_GPU
    else:
        channel.send(device=device())
    compile_cache.use_cache()
    try:
        cases = builders[name](rehearse)
    except Skipped as error:
        channel.send(skipped=str(error))
        return 0
    return measure(cases, channel)


def device() -> dict[str, Any]:
    """The device of JAX and the versions of libraries."""
    first, versions = jax.devices()[0], dict[str, str]()
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    memory = (first.memory_stats() or {}).get("bytes_limit")
    return {"platform": first.platform, "kind": first.device_kind, "memory": memory, "versions": versions}


def measure(cases: Sequence[Case], channel: Channel) -> int:
    """Compiles all cases, then measures one after the other and sends its results; returns 1 if one has failed."""
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // 4, 1)) as pool:
        compiled = [pool.submit(case.compile) for case in cases]
        concurrent.futures.wait(compiled, PATIENCE)
        for case, future in zip(cases, compiled, strict=True):
            try:
                function = future.result()
                with channel.turn() if case.timed else contextlib.nullcontext(0) as others:
                    found = function()
                results = found if isinstance(found, list) else [found]
                channel.send(results=[{"name": case.name, **result, "compiling": others} for result in results])
            except Exception as error:  # out of memory, say: the other cases are measured all the same
                failed = 1
                channel.send(results=[{"name": case.name, "error": error_line(error)}])
    return failed


# Training.


def config_of(model: str, rehearse: bool, *overrides: str, source: int = 0) -> Config:
    """The paper's setting for a model; `source`: another length of sources."""
    tiny = ("train.batch_size=4", "train.accumulate=2", "data.max_source=32", "data.max_target=16")
    config = config_lib.load(str(ROOT / "configs" / "jsonl.py"), [*overrides, *(tiny if rehearse else ())])
    source = (64 if rehearse else source) if source else config.data.max_source
    return dataclasses.replace(steps.of_length(config, source), model=SIZES["tiny" if rehearse else model])


def training(model: str, rehearse: bool, *overrides: str, source: int = 0, again: bool = False) -> list[Case]:
    """A training step; `again`: also its compilation from the cache."""
    config, first = config_of(model, rehearse, *overrides, source=source), jax.devices()[0]

    def compiling(config: Config) -> tuple[Any, Result]:
        trainer, terms = plan(config, [first])
        begun = time.perf_counter()
        trainer.program(longest_batch(config))
        return trainer, {"compile_s": time.perf_counter() - begun, "estimate_bytes": int(sum(terms.values()))}

    def compile() -> Callable[[], Result]:
        chosen = steps.resolved(config)
        trainer, found = compiling(chosen)
        step = stepper(trainer, chosen)
        size = steps.work(chosen)
        found |= size | {"remat": chosen.train.remat, "blocks": trainer.blocks is not None}
        found["compiled_bytes"] = int(compiled_bytes(trainer, chosen))

        def measuring() -> Result:
            step()
            seconds, peak = min(step() for _ in range(4)), costs.peak(first)
            used = (first.memory_stats() or {}).get("peak_bytes_in_use")
            share = size["model_flops"] / seconds / peak if peak else None
            found.update(step_s=seconds, utilisation=share, peak_bytes=used)
            return found | {"profile": profile.profiled(step)}

        return measuring

    def from_the_cache() -> Result:
        jax.clear_caches()
        return {"compile_s": compiling(steps.resolved(config))[1]["compile_s"]}

    setting = ", ".join([f"T5-{model.capitalize()}", f"{config.data.max_source:,} tokens", *overrides])
    cases = [Case(setting, compile)]
    return [*cases, Case(f"{setting}, from the cache", lambda: from_the_cache, timed=False)] if again else cases


def torch_device(rehearse: bool) -> str:
    """The device for PyTorch; raises Skipped if there is no PyTorch with CUDA."""
    for name in ("torch", "transformers"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise Skipped(f"{name} is not installed") from None
    import torch

    if rehearse:
        return "cpu"
    if not torch.cuda.is_available():
        raise Skipped("PyTorch finds no CUDA")
    return "cuda"


def transformers(rehearse: bool) -> list[Case]:
    """Training steps of transformers in PyTorch."""
    where, config = torch_device(rehearse), config_of("base", rehearse)

    def measuring(way: str) -> Result:
        import torch

        found = peer.measured(config, way, where, 2 if rehearse else 4)
        peak = None if rehearse else costs.peak(SimpleNamespace(device_kind=torch.cuda.get_device_name()))
        return found | {"utilisation": found["model_flops"] / found["step_s"] / peak if peak else None}

    def case(way: str) -> Case:
        return Case(f"T5-Base, {peer.WAYS[way]}", lambda: partial(measuring, way))  # there is nothing to compile

    return [case(way) for way in ("checkpointing", "plain")]


# Attention.


def attention(rehearse: bool) -> list[Case]:
    """Errors of attention in blocks and of XLA's attention in bfloat16 beside float32, and times of both."""
    interpret = jax.default_backend() != "gpu"
    kinds, few, many = ("encoder", "decoder", "cross"), *((1, 1) if rehearse else (2, 6))

    def errors(kind: str) -> Callable[[], list[Result]]:
        return Attention(kind, rehearse, batch=few).errors()

    def times(kind: str, by: str) -> Callable[[], Result]:
        return Attention(kind, rehearse, batch=many).times(by)

    compared = [Case(kind, partial(errors, kind), timed=False) for kind in kinds]
    pairs = itertools.product(kinds[2 * rehearse :], ("blocks", "XLA"))
    timed = [Case(f"{kind}, {by}", partial(times, kind, by)) for kind, by in pairs]
    widths = (16,) if rehearse else (64, 128)
    trials = [Case(f"heads of {x}", partial(difference, x, interpret), timed=False) for x in widths]
    return [*compared, *timed, *trials]


def difference(width: int, interpret: bool) -> Callable[[], Result]:
    """Compares as pipejax does before it uses the kernels."""
    apart = float(block_attention.difference(width, interpret=interpret))
    return lambda: {"apart": apart, "agrees": apart < block_attention.TOLERANCE}


class Attention:
    """Attention of T5-Base in the paper's setting: an encoder's, a decoder's, or from a decoder to an encoder."""

    def __init__(self, kind: str, rehearse: bool, *, batch: int) -> None:
        """Draws random queries, keys, values and gradients."""
        heads, width, source, slots = (2, 16, 96, 64) if rehearse else (12, 64, 2048, 768)
        tokens, slot = jnp.arange(source), jnp.arange(slots)
        real = jnp.full((batch, 1), source).at[0].set(source * 3 // 4)  # one source is shorter
        row, time_ = (jnp.broadcast_to(x, (batch, slots)) for x in (slot // 48, slot % 48))
        place = jnp.broadcast_to(tokens, (batch, source))
        encoder = Slots(jnp.where(tokens < real, 0, -1), position=place, consecutive=True)
        decoder = Slots(jnp.zeros_like(row), row, time_, row + time_)
        sides = {"encoder": (encoder, encoder), "decoder": (decoder, decoder)}
        self.queries, self.keys = sides.get(kind) or (Slots(decoder.group), Slots(encoder.group))
        rng = np.random.default_rng(0)

        def draw(slots: Slots, scale: float = width**-0.25) -> Array:
            shape = batch, heads, slots.group.shape[1], width
            return jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)

        self.given: tuple[Array, ...] = draw(self.queries), draw(self.keys), draw(self.keys)
        self.gradient, self.seed = draw(self.queries, 1.0), jnp.asarray([1, 2], jnp.uint32)
        if kind != "cross":  # this has no bias
            self.given = *self.given, jnp.asarray(rng.standard_normal((32, heads)), jnp.float32)
        near = buckets(np.arange(129), count=16, longest=128)
        self.bucket = jnp.asarray(np.concatenate([near[:0:-1], near[:1], near[1:] + 16])[::-1])
        self.scores = batch * heads * self.queries.group.shape[1] * self.keys.group.shape[1]

    def by_blocks(self, queries: Array, keys: Array, values: Array, *table: Array) -> Array:
        """pipejax's kernels."""
        distances = Distances(table[0], self.bucket) if table else None
        seen = Seen(self.queries, self.keys, distances, Blocks(interpret=jax.default_backend() != "gpu"))
        return block_attention.attend_in_blocks(queries, keys, values, seen, self.seed, 0.1)

    def by_xla(self, queries: Array, keys: Array, values: Array, *table: Array) -> Array:
        """XLA, with an array of queries by keys."""
        of_queries = jax.tree.map(lambda x: x[:, :, None], self.queries)
        of_keys = jax.tree.map(lambda x: x[:, None], self.keys)
        seen = (of_queries.group == of_keys.group) & (of_keys.group >= 0)
        if of_queries.row is not None:
            seen &= (of_keys.row <= of_queries.row) & (of_keys.time <= of_queries.time)
        bias = jnp.where(seen, 0.0, -1e9)[:, None]
        if table:
            apart = jnp.clip(of_queries.position - of_keys.position + 128, 0, 256)[:1]  # all examples have the same
            bias = bias + jnp.moveaxis(table[0][self.bucket[apart]], -1, 1)
        return attend(queries, keys, values, bias, self.seed, 0.1)

    def differentiate(self, function: Callable[..., Array], gradient: Array, *given: Array) -> tuple[Array, ...]:
        """The output and the gradients of all arguments."""
        real = (self.queries.group >= 0)[:, None, :, None]
        found, back = jax.vjp(lambda *x: jnp.where(real, function(*x), 0), *given)
        return (found, *back(gradient))

    def errors(self) -> Callable[[], list[Result]]:
        """Computes norms of differences from float32, divided by norms of float32."""
        given = self.gradient, *self.given
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(partial(self.differentiate, self.by_xla))(*(x.astype(jnp.float32) for x in given))
        both = [jax.jit(partial(self.differentiate, x))(*given) for x in (self.by_blocks, self.by_xla)]
        found = []
        for name, truth, *rounded in zip(ARRAYS, exact, *both, strict=False):  # without a bias there is no table
            apart = [float(jnp.linalg.norm(x.astype(jnp.float32) - truth)) for x in rounded]
            ours, theirs = (each / float(jnp.linalg.norm(truth)) for each in apart)
            found.append({"array": name, "blocks_error": ours, "xla_error": theirs})
        return lambda: found

    def times(self, by: str) -> Callable[[], Result]:
        """Compiles attention, and attention with its gradients; measures both."""
        function, given = self.by_blocks if by == "blocks" else self.by_xla, (self.gradient, *self.given)
        alone = jax.jit(function).lower(*self.given).compile()
        both = jax.jit(partial(self.differentiate, function)).lower(*given).compile()

        def measuring() -> Result:
            found = {"forward_s": least(partial(alone, *self.given)), "both_s": least(partial(both, *given))}
            return found | {
                "scores": self.scores,
                "profile": profile.profiled(lambda: jax.block_until_ready(both(*given))),
            }

        return measuring


def least(call: Callable[[], Any], rounds: int = 7) -> float:
    """The seconds of the fastest of some calls, after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begun)
    return min(times[1:])


# Decoding.


class Decodes:
    """A T5 with random weights and one encoded source, for decodes in which no answer ends."""

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
        """A strategy whose answers have no end, with that many rows."""
        return Sequential(steps, eos=10**6) if queries == 1 else Pipelined(1, steps, queries, eos=10**6)

    def case(self, name: str, backend: Backend, queries: int, turn: int, **options: Any) -> Case:
        """A case of `compile`."""
        steps = f"{turn} {'step' if turn == 1 else 'steps'} in an iteration"
        queries_ = f"{queries} {'query' if queries == 1 else 'queries'}"
        label = f"{name}, {queries_}, {steps}"
        return Case(label, partial(self.compile, label, backend, queries, turn, **options))

    def compile(
        self,
        name: str,
        backend: Backend,
        queries: int,
        turn: int,
        *,
        graphs: str | None = None,
        blocks: launch.LaunchBlocks | None = None,
        keeps: bool = False,
    ) -> Callable[[], Result]:
        """Compiles a decode that pauses after a number of steps.

        Args:
          name: of the case.
          backend: computes the steps.
          queries: of a step.
          turn: steps in an iteration of the loop.
          graphs: what XLA may put into a CUDA graph; None: XLA's choice.
          blocks: of the launch that decodes; None: XLA's loop does.
          keeps: whether the carry with the cache is returned as well.
        """
        strategy = self.strategy(queries)
        sizes = Sizes.fit(strategy, 1, slots=programs.SLOTS[1:], turn=turn)
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
        options |= {} if graphs is None else {OPTION: graphs}
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
                found["profile"] = profile.profiled(partial(answer, self.many))
                found["kernels_s"] = found["profile"]["busy_s"] / self.many
            return found

        return measuring

    def compile_product(self) -> Callable[[], Result]:
        """Compiles what `pipejax decode` compiles; its fixed part contains the encoder."""
        found = Programs(self.config, BFLOAT16, devices=jax.local_devices()[:1], backend=self.own)
        found.set_params(self.params)
        source = self.source.tolist()

        def call(count: int) -> Any:
            strategy = self.strategy(9, count)
            decoded = found.decode(source, strategy, batch_size=1, across=1, report=Report())
            assert decoded.steps.tolist() == [count], "an answer has ended"
            return decoded.tokens

        counts = self.few, self.many
        for count in counts:
            call(count)

        def measuring() -> Result:
            few, many = (least(partial(call, count)) for count in counts)
            return slope(counts[0], few, counts[1], many)

        return measuring


def slope(few: int, few_s: float, many: int, many_s: float) -> Result:
    """The seconds of a step, and those of a decode that do not depend on its steps."""
    step = (many_s - few_s) / (many - few)
    return {"step_s": step, "fixed_s": few_s - few * step}


def host_loops(dump: Path) -> int | None:
    """The number of loops that the host controls in a compiled program; None: XLA wrote no list of its thunks."""
    lists = [*dump.glob("*decode*thunk_sequence_after_thunk_passes*.txt")]
    return sum(path.read_text(encoding="utf-8").count("kWhile") for path in lists) if lists else None


def decode(rehearse: bool) -> list[Case]:
    """Steps of T5-Base with CUDA graphs in several ways, by own kernels and by XLA's."""
    every = Decodes(rehearse)
    own = every.own
    cases = [
        every.case("own kernels", own, 9, 4),
        every.case("own kernels, loops in the graph", own, 9, 4, graphs=GRAPHS),
        every.case("own kernels, no graphs", own, 9, 4, graphs=""),
        every.case("XLA's kernels", XLA, 9, 4),
        every.case("XLA's kernels, loops in the graph", XLA, 9, 4, graphs=GRAPHS),
        every.case("XLA's kernels", XLA, 1, 4),
        every.case("XLA's kernels, loops in the graph", XLA, 1, 4, graphs=GRAPHS),
        every.case("own kernels, loops in the graph", own, 9, 1, graphs=GRAPHS),
        every.case("own kernels, cache returned", own, 9, 4, keeps=True),
        Case("pipejax decode with its encoder, 9 queries", every.compile_product),
        every.case("own kernels", own, 9, 1),
        every.case("own kernels", own, 20, 4),
    ]
    return [cases[1], cases[3], cases[9]] if rehearse else cases


def one_launch(rehearse: bool) -> list[Case]:
    """A decode in one launch of a kernel (`lab.launch`), beside XLA's kernels."""
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

    cases = [Case("launch, logits", compare)]
    for queries in (9,) if rehearse else (9, 1, 20):
        cases += [every.case("XLA's kernels", XLA, queries, 1), every.case("launch", XLA, queries, 1, blocks=blocks)]
    return cases


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


def torch_graph(rehearse: bool) -> list[Case]:
    """Decoding steps by hand in PyTorch, replayed from a CUDA graph."""
    where, config = torch_device(rehearse), SIZES["tiny" if rehearse else "base"]
    params = cache(lambda: random_params(config))

    def compile(queries: int) -> Callable[[], Result]:
        step = graph.Step(config, params(), queries, 32 if rehearse else 512, 448, device=where)
        return lambda: {"step_s": graph.measured(step, 22)}

    return [Case(f"PyTorch, CUDA graph, {n} {'query' if n == 1 else 'queries'}", partial(compile, n)) for n in (9, 1)]


def agreements(rehearse: bool) -> list[Case]:
    """Own kernels of decoding beside XLA's: on random numbers, in log-probabilities and in tokens."""
    interpret, tiny = jax.default_backend() != "gpu", SIZES["tiny"]
    layers: Any = {"num_layers": 2, "num_decoder_layers": 2}
    config: T5Config = dataclasses.replace(tiny if rehearse else SIZES["base"], **layers)
    params, own = random_params(config), Gpu(interpret=interpret)
    source = np.random.default_rng(1).integers(3, config.vocab_size, (2, 32 if rehearse else 128)).tolist()
    strategy = Pipelined(1, 12, 4) if rehearse else Pipelined(1, 24, 8)

    def computed(function: Callable[[], Result]) -> Callable[[], Result]:
        found = function()
        return lambda: found

    four = cache(lambda: agreement.Four(config, params, own))
    every: dict[str, Callable[[], Result]] = {
        f"random numbers, {n} queries": partial(agreement.trial, n, interpret)
        for n in (agreement.QUERIES[:1] if rehearse else agreement.QUERIES)
    }
    every["log-probabilities"] = lambda: four().outputs("bfloat16", source, strategy, 0.0)
    every["tokens"] = lambda: four().tokens("bfloat16", source, strategy)
    return [Case(name, partial(computed, function), timed=False) for name, function in every.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
