"""The systems that are compared: one T5 with random weights, in each system's own format.

All offer `encode(source)` and `decode(encoded, rows)`, raise if what they decoded has not the lengths asked for, and
use the same number of threads.
"""

import itertools
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lab.benchmarks.forced import Decoder, Forced
from pipejax.config import T5Config
from pipejax.convert.huggingface import write_hf
from pipejax.decoding import Pipelined, Sequential
from pipejax.grid import sequential_steps
from pipejax.inference import backends
from pipejax.inference.backends import Backend, Ready
from pipejax.model.t5 import T5
from pipejax.model.t5_config import ARCHITECTURES
from pipejax.system import cli
from pipejax.system.errors import UserError

SIZES = {
    "tiny": T5Config(512, d_model=32, d_kv=16, d_ff=64, num_heads=2, num_layers=2, num_decoder_layers=2),
    **ARCHITECTURES,
}
PEERS = ("hf", "hf-bf16", "hf-int8", "hf-compiled", "ct2-fp32", "ct2-int8")  # CTranslate2 has no bfloat16 on a CPU
SUFFIXES = {"float32": "", "bfloat16": "-bf16", "int8": "-int8"}  # of the names of ours, by what weights are held in
KERNELS = {"own": "", "xla": "-xla"}  # likewise, by whose kernels compute: our own where there are some, or XLA's
SPECIAL = ("<pad>", "</s>", "<unk>")  # words of the first ids
Rows = Sequence[Sequence[int]]  # lengths of the rows of each example


class Run(NamedTuple):
    """One measurement, in seconds."""

    encode_s: float
    decode_s: float


class System(Protocol):
    """What is measured."""

    name: str

    def run(self, source: np.ndarray, rows: Rows) -> Run:
        """Encodes full-length sources i32 [B, L] and decodes rows of these lengths.

        Raises:
          AssertionError: it decoded something else.
        """

    def steps(self, rows: Rows) -> int:
        """Decoder steps of that batch."""


def use_threads(count: int) -> None:
    """Binds the process to `count` processors; call it before any library starts its threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    os.environ["NPROC"] = os.environ["OMP_NUM_THREADS"] = str(count)


def settle() -> None:
    """Waits until threads of the system before no longer wait for work, which keeps the processors busy for a while."""
    time.sleep(0.05)


def names_of(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """The names of a list with commas, each once; raises a UserError for one that is not known."""
    names = dict.fromkeys(name for name in text.split(",") if name)
    if unknown := names.keys() - {*known}:
        raise UserError(f"{flag}: found {', '.join(sorted(unknown))}; expected {', '.join(known)}")
    if not names and flag != "--peers":
        raise UserError(f"{flag}: found nothing; expected {', '.join(known)}")
    return [*names]


def random_params(config: T5Config, seed: int = 0) -> Any:
    """Parameters of Hugging Face's initial scales, from NumPy's generator."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: config.init_params(key), jax.random.key(0))

    def draw(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("scale"):
            return np.ones(x.shape, np.float32)
        std = 1.0 if name.startswith("shared") else x.shape[0] ** -0.5
        if name.endswith("query/kernel"):
            std *= config.d_kv**-0.5
        return rng.standard_normal(x.shape, np.float32) * np.float32(std)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def words_of(ids: Iterable[int]) -> list[str]:
    """The made-up words of these ids."""
    return [SPECIAL[i] if i < len(SPECIAL) else f"t{i}" for i in ids]


def write(config: T5Config, params: Any, directory: Path) -> Path:
    """Writes DIR/hf with a vocabulary of made-up words: id i is "t<i>", but for `SPECIAL`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    target = directory / "hf"
    write_hf(config, params, target, None)
    words = {word: i for i, word in enumerate(words_of(range(config.vocab_size)))}
    inner = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[2]))
    special = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(target)
    return target


class Pipejax:
    """Ours, pipelined or sequential."""

    def __init__(
        self, name: str, model: T5, ready: Ready, strategy: Pipelined | Sequential, *, backend: Backend
    ) -> None:
        """Nothing compiles yet."""
        self.name, self.kernels = name, type(backend).__name__  # "own" ones may not work here: this is who computes
        self.decoder = Decoder(model, ready, Forced(strategy), backend=backend)

    def run(self, source: np.ndarray, rows: Rows) -> Run:
        """See `System`."""
        begun = time.perf_counter()
        memory = self.decoder.encode(source, np.full(len(source), source.shape[1], np.int32))
        middle = time.perf_counter()
        self.decoder.decode(memory, rows)
        return Run(middle - begun, time.perf_counter() - middle)

    def steps(self, rows: Rows) -> int:
        """The most of any example."""
        return max(self.decoder.strategy.steps(r) for r in rows)


class HuggingFace:
    """`generate` of transformers, eager PyTorch, on the device that ours runs on.

    "hf" is in the given dtype, "hf-bf16" in bfloat16, and "hf-int8" in float32 with PyTorch's dynamic int8 for all
    matrices but the embedding, which PyTorch has for CPUs only. "hf-compiled" is "hf" with a static cache; transformers
    then has PyTorch compile the decoder's step, but not for a CPU.
    """

    def __init__(self, name: str, directory: Path, *, threads: int, dtype: str = "float32") -> None:
        """Loads the model."""
        import torch
        from transformers import T5ForConditionalGeneration

        torch.set_num_threads(threads)
        self.name, self.torch = name, torch
        self.options = {"cache_implementation": "static"} if name == "hf-compiled" else {}
        dtype = {"hf-bf16": "bfloat16", "hf-int8": "float32"}.get(name, dtype)
        self.device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        model = T5ForConditionalGeneration.from_pretrained(directory, dtype=getattr(torch, dtype))
        self.model = model.to(self.device).eval()
        if name == "hf-int8":
            with warnings.catch_warnings():  # its successor is a library of its own
                warnings.simplefilter("ignore")
                quantize: Any = torch.ao.quantization.quantize_dynamic
                self.model = quantize(self.model, {torch.nn.Linear}, dtype=torch.qint8)

    def run(self, source: np.ndarray, rows: Rows) -> Run:
        """See `System`."""
        lengths = [sequential_steps(r) for r in rows]
        with self.torch.inference_mode():
            begun = time.perf_counter()
            ids = self.torch.tensor(source, dtype=self.torch.long, device=self.device)
            mask = self.torch.ones_like(ids)
            encoded = self.model.encoder(input_ids=ids, attention_mask=mask)
            if self.device == "cuda":
                self.torch.cuda.synchronize()
            middle = time.perf_counter()
            found = self.generate(lengths, encoder_outputs=encoded, attention_mask=mask)
            after = time.perf_counter()
        check_lengths(found, lengths)
        return Run(middle - begun, after - middle)

    def generate(self, lengths: Sequence[int], **inputs: Any) -> list[list[int]]:
        """Greedy answers of exactly these lengths, eos included."""
        from transformers import LogitsProcessor, LogitsProcessorList

        ends = self.torch.tensor(lengths, device=self.device)

        class Force(LogitsProcessor):  # type: ignore[misc]
            def __call__(self, ids: Any, scores: Any) -> Any:
                scores[:, 1] = float("-inf")
                scores[ids.shape[1] >= ends, 1] = float("inf")
                return scores

        found = self.model.generate(
            **inputs,
            max_new_tokens=max(lengths),
            do_sample=False,
            num_beams=1,
            logits_processor=LogitsProcessorList([Force()]),
            **self.options,
        )
        return [row[1 : 1 + n] for row, n in zip(found.tolist(), lengths, strict=True)]

    def steps(self, rows: Rows) -> int:
        """The most of any example."""
        return max(map(sequential_steps, rows))


class CTranslate2:
    """CTranslate2, greedy, float32 or int8 weights.

    It encodes and decodes in one call, so the encoder's share is that of an answer of one token, less a step.
    """

    def __init__(self, name: str, directory: Path, *, threads: int) -> None:
        """Converts what `write` wrote, once, and loads it."""
        import ctranslate2

        kind = {"ct2-fp32": "float32", "ct2-int8": "int8"}[name]
        target = directory.parent / name
        if not target.is_dir():
            ctranslate2.converters.TransformersConverter(str(directory)).convert(str(target), quantization=kind)
        self.name, options = name, {"compute_type": kind, "inter_threads": 1, "intra_threads": threads}
        self.translator = ctranslate2.Translator(str(target), device="cpu", **options)

    def run(self, source: np.ndarray, rows: Rows) -> Run:
        """See `System`."""
        lengths = {sequential_steps(r) for r in rows}
        if len(lengths) > 1:
            raise ValueError(f"rows: found answers of {sorted(lengths)} tokens; expected one length for CTranslate2")
        (length,) = lengths
        words = [words_of(ids) for ids in source.tolist()]
        one, whole = self._timed(words, 1), self._timed(words, length)
        step = (whole - one) / (length - 1)
        return Run(one - step, whole - one + step)

    def _timed(self, words: list[list[str]], length: int) -> float:
        begun = time.perf_counter()
        found = self.generate(words, length)
        after = time.perf_counter()
        check_lengths(found, [length] * len(words))
        return after - begun

    def generate(self, words: list[list[str]], length: int) -> list[list[str]]:
        """Greedy answers of exactly this length."""
        found = self.translator.translate_batch(
            words, beam_size=1, min_decoding_length=length, max_decoding_length=length, max_input_length=0
        )
        return [r.hypotheses[0] for r in found]

    def steps(self, rows: Rows) -> int:
        """The most of any example."""
        return max(map(sequential_steps, rows))


def peer(name: str, directory: Path, *, threads: int, dtype: str = "float32") -> HuggingFace | CTranslate2:
    """One of `PEERS`, of what `write` wrote; `dtype` is Hugging Face's."""
    if name.startswith("hf"):
        return HuggingFace(name, directory, threads=threads, dtype=dtype)
    return CTranslate2(name, directory, threads=threads)


def check_lengths(found: Sequence[Sequence[Any]], wanted: Sequence[int]) -> None:
    """Raises an AssertionError if an answer has another length."""
    assert [len(x) for x in found] == list(wanted), f"answers of {[len(x) for x in found]} tokens, not {list(wanted)}"


def bandwidth(threads: int, size: int = 2**27) -> float:
    """Bytes a second that so many threads read, or the accelerator: sums of 512 MiB, the best of several."""
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
    """Bytes a second that the first device reads: the largest of 4 GiB, the best of several."""
    numbers, reduce = jnp.ones(size, jnp.float32), jax.jit(jnp.max)
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        reduce(numbers).block_until_ready()
        times.append(time.perf_counter() - begun)
    return 4 * size / min(times)


def step_bytes(config: T5Config, *, source: int, slots: int, itemsize: int) -> int:
    """Bytes that one decoder step of one example reads: weights, memory, the cache of that many slots."""
    inner = config.num_heads * config.d_kv
    feed = (3 if config.feed_forward != "relu" else 2) * config.d_model * config.d_ff
    layer = 6 * config.d_model * inner + feed + 2 * inner * (source + slots)
    return itemsize * (config.num_decoder_layers * layer + config.d_model * config.vocab_size)


def interleaved(
    systems: Sequence[System],
    source: np.ndarray,
    rows: Rows,
    rounds: int,
    tick: Callable[[], None],
    failures: dict[str, str] | None = None,
) -> dict[str, list[Run]]:
    """All systems in turn, `rounds` times, each round in another order; one round more before that does not count.

    With `failures` a system that raises an error is left out from then on, and the error is written there.
    """
    found: dict[str, list[Run]] = {system.name: [] for system in systems}
    for number in range(rounds + 1):
        shift = number % len(systems)
        for system in (*systems[shift:], *systems[:shift]):
            if system.name in found:
                try:
                    run = system.run(source, rows)
                except Exception as error:  # of whatever kind: the others are measured all the same
                    if failures is None:
                        raise
                    failures[system.name] = error_line(error)
                    del found[system.name]
                else:
                    found[system.name] += [run] * bool(number)
            tick()
    return found


def error_line(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def paired(own: Sequence[Run], other: Sequence[Run], *, whole: bool) -> float:
    """Median over the rounds of other / own; `whole`: the encoder included."""
    pairs = zip(own, other, strict=True)
    return statistics.median((b.decode_s + whole * b.encode_s) / (a.decode_s + whole * a.encode_s) for a, b in pairs)


def machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
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
    """Writes JSON for the flag --json."""
    cli.write_output("--json", path, json.dumps(value, indent=2) + "\n")


def build(
    config: T5Config,
    params: Any,
    dtype: str,
    *,
    strategies: dict[str, Pipelined | Sequential],
    weights: str = "auto",
    kernels: str = "own",
) -> list[Pipejax]:
    """Ours, on shared weights, held in what `weights` says; `kernels`: one of `KERNELS`."""
    model = T5(config, dtype=jnp.dtype(dtype))
    backend = backends.fastest(config, model.dtype, weights) if kernels == "own" else backends.Xla(weights)
    ready = jax.jit(lambda p: backend.prepare(model, p))(params)
    return [Pipejax(name, model, ready, strategy, backend=backend) for name, strategy in strategies.items()]


def build_each(
    config: T5Config,
    params: Any,
    dtype: str,
    *,
    strategies: dict[str, Pipelined | Sequential],
    weights: Sequence[str],
    kernels: Sequence[str] = ("own",),
) -> list[Pipejax]:
    """Ours with weights held in each of these ways and computed by each of these kernels, which their names end in."""
    ours: list[Pipejax] = []
    for held, whose in itertools.product(weights, kernels):
        named = {name + SUFFIXES[held] + KERNELS[whose]: strategy for name, strategy in strategies.items()}
        own = "auto" if held == dtype else held
        ours += build(config, params, dtype, strategies=named, weights=own, kernels=whose)
    return ours
