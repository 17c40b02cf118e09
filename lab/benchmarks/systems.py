"""The systems that are compared, pipejax and `peers`: all run one T5 with random weights, in their own formats.

Each system raises an error if its answers do not have the given lengths. All use the same number of threads.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from lab.benchmarks.forced import Decoder, Forced
from lab.benchmarks.peers.vocabulary import SPECIAL, words_of
from lab.benchmarks.peers.worker import error_line
from pipejax.convert.huggingface import write_hf
from pipejax.decoding import Pipelined, Sequential
from pipejax.inference import backends
from pipejax.inference.backends import Backend, Ready
from pipejax.model.backbone import Backbone, Module
from pipejax.model.t5_config import ARCHITECTURES, T5Config, architecture
from pipejax.system import cli
from pipejax.system.errors import UserError

SIZES = {
    "tiny": T5Config(512, d_model=32, d_kv=16, d_ff=64, num_heads=2, num_layers=2, num_decoder_layers=2),
    **ARCHITECTURES,
}
SUFFIXES = {"float32": "", "bfloat16": "-bf16", "int8": "-int8"}  # suffixes of pipejax's names, by the dtype of weights
KERNELS = {"own": "", "xla": "-xla"}  # suffixes by kernels: our own if there are any, or XLA's
Rows = Sequence[Sequence[int]]  # lengths of the rows of each example


class Run(NamedTuple):
    """The seconds of one measurement."""

    encode_s: float
    decode_s: float


class System(Protocol):
    """A system that the benchmarks measure."""

    name: str

    def run(self, source: np.ndarray, rows: Rows) -> Run:
        """Encodes full-length sources i32 [B, L] and decodes answers with rows of the lengths `rows`.

        Raises:
          AssertionError: the answers have other lengths.
        """

    def steps(self, rows: Rows) -> int:
        """The decoder steps of a batch with rows of the lengths `rows`."""


def use_threads(count: int) -> None:
    """Binds the process to `count` processors; call it before any library starts its threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    os.environ["NPROC"] = os.environ["OMP_NUM_THREADS"] = str(count)


def settle() -> None:
    """Waits until the threads of the previous system have gone to sleep: they spin for a while before that."""
    time.sleep(0.05)


def names_of(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in a list with commas, each once; raises a UserError for an unknown name."""
    names = dict.fromkeys(name for name in text.split(",") if name)
    if unknown := names.keys() - {*known}:
        raise UserError(flag, found=", ".join(sorted(unknown)), expected=", ".join(known))
    if not names and flag != "--peers":
        raise UserError(flag, found="nothing", expected=", ".join(known))
    return [*names]


def backbone(name: str) -> Backbone:
    """The backbone of a name in `SIZES`, or of a name that `--set model=` takes, with the ids of `SPECIAL`.

    Raises:
      UserError: there is no backbone of this name.
    """
    found: Any = SIZES.get(name) or architecture(name)
    return dataclasses.replace(found, pad_token_id=0, eos_token_id=1) if found.eos_token_id != 1 else found


def random_params(config: Backbone, seed: int = 0) -> Any:
    """Draws parameters from NumPy's generator, with scales close to Hugging Face's initial ones."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: config.init_params(key), jax.random.key(0))

    def draw(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("scale"):
            return np.ones(x.shape, np.float32)
        std = 1.0 if name.startswith("shared") else x.shape[0] ** -0.5
        if name.endswith("query/kernel") and isinstance(config, T5Config):
            std *= config.d_kv**-0.5
        return rng.standard_normal(x.shape, np.float32) * np.float32(std)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def write(config: Backbone, params: Any, directory: Path) -> Path:
    """Writes a Hugging Face model to DIR/hf unless it exists; returns DIR/hf.

    The tokenizer splits at spaces, and the word of id i is "t<i>", except for the words of `SPECIAL`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    target = directory / "hf"
    if (target / "tokenizer.json").exists():  # this file is written last
        return target
    write_hf(config, params, target, None)
    words = {word: i for i, word in enumerate(words_of(range(config.vocab_size)))}
    inner = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[2]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    special["bos_token"] = SPECIAL[config.decoder_start_token_id]
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(target)
    return target


@contextlib.contextmanager
def models(keep: str | None, size: str) -> Iterator[Path]:
    """A context with the folder of all systems' models of a size: KEEP/size, or a folder that is removed at the end."""
    if keep:
        (directory := Path(keep).resolve() / size).mkdir(parents=True, exist_ok=True)
        yield directory
    else:
        with tempfile.TemporaryDirectory(prefix="pipejax-bench-") as name:
            yield Path(name)


class Pipejax:
    """pipejax as a system, with a pipelined or a sequential decoder."""

    def __init__(
        self, name: str, model: Module, ready: Ready, strategy: Pipelined | Sequential, *, backend: Backend
    ) -> None:
        """Prepares the system; programs compile when they are first used."""
        # The name is that of the backend in use, since "own" kernels may not work here.
        self.name, self.kernels = name, type(backend).__name__
        self.decoder = Decoder(model, ready, Forced(strategy), backend=backend)

    def run(self, source: np.ndarray, rows: Rows) -> Run:
        """See `System`."""
        begun = time.perf_counter()
        memory = self.decoder.encode(source, np.full(len(source), source.shape[1], np.int32))
        middle = time.perf_counter()
        self.decoder.decode(memory, rows)
        return Run(middle - begun, time.perf_counter() - middle)

    def steps(self, rows: Rows) -> int:
        """The decoder steps of the longest answer."""
        return max(self.decoder.strategy.steps(r) for r in rows)


def bandwidth(threads: int, size: int = 2**27) -> float:
    """The bytes per second that the threads, or the accelerator, read: the best of several sums of 512 MiB."""
    if jax.default_backend() != "cpu":
        return _device_bandwidth()
    parts = np.split(np.ones(size, np.float32), threads)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for reduce in (np.sum, np.max) * 4:
            begun = time.perf_counter()
            list(pool.map(reduce, parts))
            times.append(time.perf_counter() - begun)
    return 4 * size / min(times)


def _device_bandwidth(size: int = 2**30) -> float:
    """The bytes per second that the first device reads: the best of several maxima of 4 GiB."""
    numbers, reduce = jnp.ones(size, jnp.float32), jax.jit(jnp.max)
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        reduce(numbers).block_until_ready()
        times.append(time.perf_counter() - begun)
    return 4 * size / min(times)


def step_bytes(config: Backbone, *, source: int, slots: int, itemsize: int) -> int:
    """The bytes that a decoder step of one example reads: weights, memory, and a cache of `slots` slots."""
    module, length = config.module(), jax.ShapeDtypeStruct((1, source), jnp.int32)
    params = jax.eval_shape(config.init_params, jax.random.key(0))
    memory = jax.eval_shape(lambda p, x: module.apply({"params": p}, x, x > 0, method="encode"), params, length)
    cache = jax.eval_shape(lambda p: module.apply({"params": p}, 1, slots, method="empty_cache"), params)
    flat = traverse_util.flatten_dict(params, sep="/")
    kernels = {path: x for path, x in flat.items() if path.endswith("/kernel")}
    # Products with the source are made once for all steps.
    projections = re.compile(r".*cross_attention/(key|value)/kernel")
    read = [x for path, x in kernels.items() if not path.startswith("encoder/") and not projections.fullmatch(path)]
    if not any(path.startswith("lm_head/") for path in kernels):  # the head shares the table of embeddings
        read.append(flat[config.tables[-1]])
    return itemsize * sum(math.prod(x.shape) for x in jax.tree.leaves((read, memory.keys, memory.values, cache)))


def interleaved(
    systems: Sequence[System],
    source: np.ndarray,
    rows: Rows,
    rounds: int,
    tick: Callable[[], None],
    failures: dict[str, str] | None = None,
    *,
    enough: float = math.inf,
) -> dict[str, list[Run]]:
    """Measures all systems in turn, in `rounds` rounds of different orders. A first round does not count.

    With `failures`, a system that raises an error has no further turns, and the error is added to `failures`. A system
    whose runs have taken `enough` seconds has no further turns.
    """
    found: dict[str, list[Run]] = {system.name: [] for system in systems}
    for number in range(rounds + 1):
        shift = number % len(systems)
        for system in (*systems[shift:], *systems[:shift]):
            runs = found.get(system.name)
            if runs is not None and sum(map(sum, runs)) < enough:
                settle()
                try:
                    run = system.run(source, rows)
                except Exception as error:  # any error: the other systems are measured nevertheless
                    if failures is None:
                        raise
                    failures[system.name] = error_line(error)
                    del found[system.name]
                else:
                    runs += [run] * bool(number)
            tick()
    return found


def paired(own: Sequence[Run], other: Sequence[Run], *, whole: bool) -> float:
    """The median of other / own over the rounds that both systems have; `whole`: the encoder is included."""
    pairs = zip(own, other, strict=False)
    return statistics.median((b.decode_s + whole * b.encode_s) / (a.decode_s + whole * a.encode_s) for a, b in pairs)


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % confidence interval of the median of a distribution, from independent values; None: fewer than six.

    The median lies between the k-th smallest and the k-th largest of n values with the probability that a fair coin
    shows at least k and at most n - k heads in n tosses. The largest such k for which it is 95 % is used.
    """
    n, ordered, below, k = len(values), sorted(values), 0.0, 0
    while (below := below + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    return (ordered[k - 1], ordered[-k]) if k else None


def machine(threads: int) -> dict[str, Any]:
    """The machine, the versions and the settings with which the figures were measured."""
    import importlib.metadata
    import platform

    model = platform.processor()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    versions = {}
    for name in ("jax", "torch", "transformers", "ctranslate2"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    return {
        "processor": model,
        "threads": threads,
        "device": f"{device.platform} {device.device_kind}",
        "python": platform.python_version(),
        "versions": versions,
    }


def save(path: str, value: Any) -> None:
    """Writes a value as JSON to the file of the flag --json."""
    cli.write_output("--json", path, json.dumps(value, indent=2) + "\n")


def build(
    config: Backbone,
    params: Any,
    dtype: str,
    *,
    strategies: dict[str, Pipelined | Sequential],
    weights: str = "auto",
    kernels: str = "own",
) -> list[Pipejax]:
    """Builds pipejax's systems, which share the weights. `weights`: a key of `SUFFIXES`; `kernels`: of `KERNELS`."""
    model = config.module(dtype=jnp.dtype(dtype))
    own = backends.fastest if kernels == "own" else partial(backends.choose, backends.Xla(weights))
    backend = own(config, dtype=model.dtype, weights=weights)
    ready = jax.jit(lambda p: backend.prepare(model, p))(params)
    return [Pipejax(name, model, ready, strategy, backend=backend) for name, strategy in strategies.items()]


def build_each(
    config: Backbone,
    params: Any,
    dtype: str,
    *,
    strategies: dict[str, Pipelined | Sequential],
    weights: Sequence[str],
    kernels: Sequence[str] = ("own",),
) -> list[Pipejax]:
    """Builds pipejax's systems for all of these weights and kernels, which give the suffixes of their names."""
    ours: list[Pipejax] = []
    for held, whose in itertools.product(weights, kernels):
        named = {name + SUFFIXES[held] + KERNELS[whose]: strategy for name, strategy in strategies.items()}
        own = "auto" if held == dtype else held
        ours += build(config, params, dtype, strategies=named, weights=own, kernels=whose)
    return ours
