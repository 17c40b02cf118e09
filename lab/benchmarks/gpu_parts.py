"""The parts of `lab.benchmarks.gpu`: what each process compiles and measures.

    python -m lab.benchmarks.gpu_parts NAME [--rehearse]

A part is a list of cases. All cases compile first, several at once; then they measure one after the other.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np

from lab.benchmarks import agreement, gpu_attention, gpu_decode, graph, profile, steps
from lab.benchmarks.gpu import NO_GPU, PARTS, ROOT, Case, Channel, Result
from lab.benchmarks.peers import training as peer
from lab.benchmarks.peers.worker import error_line
from lab.benchmarks.systems import SIZES, random_params
from pipejax import config as config_lib
from pipejax.apps.plan.step_memory import compiled_bytes, plan, stepper
from pipejax.config import Config, T5Config
from pipejax.decoding import Pipelined
from pipejax.kernels import block_attention, child_trials
from pipejax.kernels.backends import Gpu
from pipejax.system import compile_cache
from pipejax.training import monitoring
from pipejax.training.memory import longest_batch

PATIENCE = 120.0  # seconds for which all cases wait for the slowest compilation; then the compiled ones measure
VERSIONS = ("jax", "jaxlib", "flax", "numpy", "torch", "triton", "transformers")


class Skipped(Exception):
    """Raised by a part that cannot run on this machine."""


def main(argv: Sequence[str]) -> int:
    """Runs a part; the command line is `lab.benchmarks.gpu`'s."""
    name, rehearse = argv[0], "--rehearse" in argv
    channel = Channel(int(argv[-1]) if "--channel" in argv else None)
    builders: dict[str, Callable[[bool], list[Case]]] = {
        "train": lambda rehearse: training("base", rehearse, again=True),
        "attention": gpu_attention.cases,
        "decode": gpu_decode.cases,
        "launch": gpu_decode.launch_cases,
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
        channel.send(code=NO_GPU)
        return NO_GPU
    else:
        channel.send(device=device())
    compile_cache.use_cache()
    # The part `agreement` tries the kernels, and the others use them without a trial.
    with mock.patch.object(block_attention, "refusal", return_value=""):
        try:
            cases = builders[name](rehearse)
        except Skipped as error:
            channel.send(skipped=str(error), code=0)
            return 0
        code = measure(cases, channel)
        channel.send(code=code)  # sent before the end, since libraries may take long to end the process
        return code


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
            except Exception as error:  # such as a lack of memory: the other cases are measured nevertheless
                failed = 1
                channel.send(results=[{"name": case.name, "error": error_line(error)}])
    return failed


# Training.


def config_of(model: str, rehearse: bool, *overrides: str, source: int = 0) -> Config:
    """The paper's setting for a model; `source`: the length of sources, if it differs."""
    tiny = ("train.batch_size=4", "train.accumulate=2", "data.max_source=32", "data.max_target=16")
    config = config_lib.load(str(ROOT / "configs" / "jsonl.py"), [*overrides, *(tiny if rehearse else ())])
    source = (64 if rehearse else source) if source else config.data.max_source
    return dataclasses.replace(steps.of_length(config, source), model=SIZES["tiny" if rehearse else model])


def training(model: str, rehearse: bool, *overrides: str, source: int = 0, again: bool = False) -> list[Case]:
    """A training step; `again`: whether compilation from the cache is measured, too."""
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
            seconds, peak = min(step() for _ in range(4)), monitoring.peak(first)
            used = (first.memory_stats() or {}).get("peak_bytes_in_use")
            share = size["model_flops"] / seconds / peak if peak else None
            found.update(step_s=seconds, utilisation=share, peak_bytes=used)
            return found | profile.try_profile(step)

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
        peak = None if rehearse else monitoring.peak(SimpleNamespace(device_kind=torch.cuda.get_device_name()))
        return found | {"utilisation": found["model_flops"] / found["step_s"] / peak if peak else None}

    def case(way: str) -> Case:
        return Case(f"T5-Base, {peer.WAYS[way]}", lambda: partial(measuring, way))  # there is nothing to compile

    return [case(way) for way in ("checkpointing", "plain")]


def torch_graph(rehearse: bool) -> list[Case]:
    """Decoding steps by hand in PyTorch, replayed from a CUDA graph."""
    where, config = torch_device(rehearse), SIZES["tiny" if rehearse else "base"]
    params = cache(lambda: random_params(config))

    def compile(queries: int) -> Callable[[], Result]:
        step = graph.Step(config, params(), queries, 32 if rehearse else 512, 448, device=where)
        return lambda: {"step_s": graph.measured(step, 22)}

    return [Case(f"PyTorch, CUDA graph, {n} {'query' if n == 1 else 'queries'}", partial(compile, n)) for n in (9, 1)]


def agreements(rehearse: bool) -> list[Case]:
    """Trials of own kernels as pipejax makes them, and comparisons of own kernels of decoding with XLA's."""
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
    every["attention in blocks, trial in a child process"] = partial(tried, "block_attention", 64, True)
    every["kernels of decoding, trial in a child process"] = partial(tried, "gpu")
    every["log-probabilities"] = lambda: four().outputs("bfloat16", source, strategy, 0.0)
    every["tokens"] = lambda: four().tokens("bfloat16", source, strategy)
    return [Case(name, partial(computed, function), timed=False) for name, function in every.items()]


def tried(module: str, *arguments: int) -> Result:
    """The verdict on kernels, and the seconds of the trial; `arguments` are passed to the module's `disagreement`."""
    begun = time.perf_counter()
    found = child_trials.run_in_child(f"pipejax.kernels.{module}:disagreement", arguments)
    agrees = found.choice == child_trials.OWN if found.lasts else None
    return {"agrees": agrees, "trial_s": time.perf_counter() - begun, "verdict": found.reason}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
