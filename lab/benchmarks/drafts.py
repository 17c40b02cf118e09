"""Times drafts of pipejax, and Hugging Face's prompt lookup and assisted decoding, on real answers with equal weights.

    python -m lab.benchmarks.drafts msqa_test.jsonl --tokenizer t5_tokenizer --model base --json OUT

The weights are random, but every system writes the same answers: after a system has computed its logits, the token of
the file's "targets" is made the maximum of each column. The work is therefore the work of a T5 of this size that always
answers correctly, and drafts are accepted as often as this T5 would accept them. A small T5 that drafts is forced to
the same tokens, so all of its drafts are accepted: its speed is an upper bound, and so is the speed of Hugging Face's
assistant. The tagger of `spans` finds all rows that are in the source, and no others. If nothing can be copied, drafts
only cost time: --answers shuffled draws the tokens of an answer from the source, in random order, and --answers foreign
draws tokens that are not in the source.

The systems take turns document by document, one document at a time; the first round does not count. Pipejax pads all
sources to --max-source tokens, so that one compiled encoder suffices; Hugging Face's systems pad none.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from lab.benchmarks.documents import answers
from lab.benchmarks.systems import SIZES, machine, names_of, random_params, save, settle, use_threads, write
from pipejax import decoding
from pipejax.apps.teach.spans import Candidates, Spans, Tagger
from pipejax.apps.teach.tagging import SpanFinder
from pipejax.apps.teach.tags import SpanTags
from pipejax.config import T5Config
from pipejax.data.shapes import bucket, pad
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Drafts, Pipelined, Sequential, SourceIds, Step, Strategy, drafters, with_drafts
from pipejax.grid import start
from pipejax.inference import backends, programs
from pipejax.inference.backends import Backend, Ready
from pipejax.inference.drafter_parameters import SmallModel
from pipejax.inference.weights import Weights
from pipejax.model.precision import precision
from pipejax.model.t5 import T5, Memory
from pipejax.system import cli, compile_cache
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

Array = jax.Array
EOS, SEPARATOR = 1, "; "
ANSWERS = ("gold", "shuffled", "foreign")
SYSTEMS = (
    *("sequential", "sequential+source", "sequential+jacobi", "sequential+model"),
    *("pipelined", "pipelined+source", "pipelined+jacobi", "pipelined+model", "pipelined+spans"),
    *("hf", "hf+lookup", "hf+assistant"),
)


class Document(NamedTuple):
    """A source and its answer in token ids."""

    source: np.ndarray  # i32 [L], eos included
    rows: list[list[int]]
    line: list[int]  # the answer of a sequential decoder


class Measured(NamedTuple):
    """The seconds and the number of decoder calls of one answer."""

    encode_s: float
    decode_s: float
    calls: int


class System(Protocol):
    """A system that the benchmark measures."""

    name: str

    def run(self, document: Document) -> Measured:
        """Encodes and decodes a document; raises an AssertionError if the answer is not the document's."""


@flax.struct.dataclass
class ScriptedMemory:
    """The memory of a batch, with the tokens that its decoder is forced to write."""

    inner: Memory
    script: Any  # i32 [B, R, W], the tokens of each row; eos after the last

    @property
    def mask(self) -> Array:
        """The mask of the memory."""
        return self.inner.mask

    @property
    def adapter(self) -> None:
        """None: there are no adapters."""


@dataclasses.dataclass(frozen=True)
class ScriptedModel:
    """A `decoding.Model` that computes everything, and then chooses the tokens of the script."""

    inner: Any
    script: Array
    delay: int

    def cache(self, slots: int, old: Any) -> Any:
        """The cache of the inner model."""
        return self.inner.cache(slots, old)

    def __call__(self, step: Step, cache: Any) -> tuple[Array, Any]:
        """The logits of the inner model, with the script's token as the maximum of each column."""
        logits, cache = self.inner(step, cache)
        tokens = self._scripted(step)
        return logits.at[tokens, jnp.arange(len(tokens))].set(1e9), cache

    def greedy(self, step: Step, cache: Any) -> tuple[Array, Any]:
        """The script's tokens, after the inner model has computed its own."""
        found, cache = self.inner.greedy(step, cache)
        return jax.lax.optimization_barrier((found, self._scripted(step)))[1], cache

    def _scripted(self, step: Step) -> Array:
        """The script's tokens i32 [N] for the queries of a step."""
        example = jnp.broadcast_to(jnp.arange(len(step.row))[:, None], step.row.shape)
        place = step.time - start(step.row, self.delay)
        last = jnp.asarray(self.script.shape) - 1
        tokens = self.script[example, jnp.clip(step.row, 0, last[1]), jnp.clip(place, 0, last[2])].reshape(-1)
        if step.place_of_query is not None:
            tokens = jnp.take(tokens, step.place_of_query, mode="clip")
        return tokens


@dataclasses.dataclass(frozen=True)
class ScriptedBackend:
    """The part of a backend that `decode_batch` needs, for a `ScriptedMemory`."""

    inner: Backend
    delay: int = 1

    def decoder(self, model: T5, weights: Weights, memory: Any) -> Any:
        """A decoder that writes the tokens of the memory's script."""
        return ScriptedModel(self.inner.decoder(model, weights, memory.inner), memory.script, self.delay)


def tagger_of(config: T5Config, rows: int) -> Tagger:
    """A tagger with random weights, for answers of at most `rows` rows."""
    tags = SpanTags(rows=rows, longest=32)
    shapes = jax.eval_shape(lambda key: tags.init_params(key, config), jax.random.key(0))
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), shapes)
    return Tagger(params, tags, EOS)


def candidates_of(document: Document, tagger: Tagger, finder: SpanFinder) -> Candidates:
    """The rows of a document that are in its source, as a tagger's candidates."""
    most, longest = tagger.tags.rows + 1, tagger.tags.longest
    tokens, length = np.zeros((1, most, longest), np.int32), np.zeros((1, most), np.int32)
    found = [row for row in document.rows if len(row) < longest and finder.find(row, document.source) is not None]
    for number, row in enumerate([*found, []]):
        tokens[0, number, : len(row) + 1], length[0, number] = [*row, EOS], len(row) + 1
    chance = np.ones((1, most), np.float32)
    chance[0, len(found)] = len(found) == len(document.rows)  # the empty row, which ends the answer
    return Candidates(jnp.asarray(tokens), jnp.asarray(length), jnp.asarray(chance))


def scripted(backend: Backend) -> Any:
    """A `ScriptedBackend` that passes as a backend: `decode_batch` uses no other part of it."""
    return ScriptedBackend(backend)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A T5 that is ready to run."""

    model: T5
    ready: Ready
    backend: Backend


class Ours:
    """pipejax with one strategy."""

    def __init__(
        self,
        name: str,
        own: Prepared,
        strategy: Strategy,
        length: int,
        small: Prepared | None,
        finder: SpanFinder,
    ) -> None:
        """Prepares the system; programs compile when they are first used.

        Args:
          name: the name of the system.
          own: the T5 that decodes.
          strategy: the strategy of the decoder.
          length: sources are padded to this length.
          small: the T5 that drafts, if any.
          finder: finds rows in the source for the tagger.
        """
        self.name, self.own, self.strategy, self.length, self.small = name, own, strategy, length, small
        self.finder = finder
        self.tagger = tagger_of(own.model.config, GRID.rows) if isinstance(strategy.drafter, Spans) else None
        self._read = jax.jit(self._tagged)
        self.sizes = programs.schedule(strategy, 1)
        self._encode = {
            id(each): jax.jit(
                partial(programs.encode_batch, each.model, backend=each.backend, outputs=self.tagger is not None)
            )
            for each in (own, small)
            if each
        }
        options: dict[str, Any] = {"sizes": self.sizes, "backend": scripted(own.backend)}
        decode = partial(programs.decode_batch, own.model, strategy, **options)
        self._decode = jax.jit(decode, static_argnames="slots")

    def run(self, document: Document) -> Measured:
        """See `System`."""
        rows = [document.line] if isinstance(self.strategy, Sequential) else document.rows
        script = np.full((1, self.strategy.places[0], WIDTH), EOS, np.int32)
        for i, row in enumerate(rows):
            script[0, i, : len(row)] = row
        ids, length = pad([document.source], self.length), np.asarray([len(document.source)], np.int32)
        with precision(self.own.model.dtype):
            begun = time.perf_counter()
            memory, of_small = self._encoded(self.own, ids, length), None
            if self.tagger:
                rows_found = candidates_of(document, self.tagger, self.finder)
                of_small = self._read(self.tagger, ids, length, memory.encoded, rows_found)
                memory = dataclasses.replace(memory, encoded=None)
                jax.block_until_ready(of_small)
            if self.small:
                of_small = ScriptedMemory(self._encoded(self.small, ids, length), script)
            middle = time.perf_counter()
            padded = np.pad(ids, ((0, 0), (0, memory.mask.shape[1] - ids.shape[1])))
            source = SourceIds(padded, length, memory=of_small)
            drafter: Any = self.tagger
            if self.small:
                laid = self.small.ready
                drafter = SmallModel(laid.encoding, laid.decoding, self.small.model, scripted(self.small.backend))
            weights = self.own.ready.decoding, drafter
            read = source if self.strategy.reads_source else None
            found = decoding.run(
                lambda slots, carry: self._decode(weights, ScriptedMemory(memory, script), carry, read, slots=slots),
                self.sizes,
            )
            decoded = jax.device_get(found.decoded)
            after = time.perf_counter()
        wrote = [row[:n].tolist() for row, n in zip(decoded.tokens[0], decoded.lengths[0], strict=True) if n]
        assert wrote == rows, f"{self.name} wrote {wrote}, not {rows}"
        calls = int((self.strategy.calls(decoded) if decoded.calls is None else decoded.calls)[0])
        return Measured(middle - begun, after - middle, calls)

    def _tagged(self, tagger: Tagger, ids: Array, length: Array, encoded: Array, rows: Candidates) -> Candidates:
        """The candidates `rows`, after the tagger has computed its own."""
        own = programs.read_batch(self.strategy.drafter, tagger, ids, length, encoded)
        found: Candidates = jax.lax.optimization_barrier((own, rows))[1]
        return found

    def _encoded(self, each: Prepared, ids: np.ndarray, length: np.ndarray) -> Memory:
        found: Memory = jax.block_until_ready(self._encode[id(each)](each.ready.encoding, ids, length))
        return found


class HuggingFace:
    """`generate` of transformers in float32: greedy, with `prompt_lookup_num_tokens`, or with an assistant."""

    def __init__(self, name: str, model: Any, assistant: Any, tokens: int) -> None:
        """Counts the calls of the decoder. `model` and `assistant` are models of transformers."""
        import torch

        self.name, self.torch, self.model, self.calls = name, torch, model, 0
        options = {"hf": {}, "hf+lookup": {"prompt_lookup_num_tokens": tokens}}
        self.options: dict[str, Any] = options.get(name, {"assistant_model": assistant})
        model.decoder.register_forward_hook(lambda *_: setattr(self, "calls", self.calls + 1))

    def run(self, document: Document) -> Measured:
        """See `System`."""
        from transformers import LogitsProcessor, LogitsProcessorList

        expected = [*document.line, EOS]

        class Force(LogitsProcessor):  # type: ignore[misc]
            def __call__(self, ids: Any, scores: Any) -> Any:
                scores[:, expected[min(ids.shape[1] - 1, len(expected) - 1)]] = 1e9
                return scores

        with self.torch.inference_mode():
            begun = time.perf_counter()
            ids = self.torch.tensor(document.source[None]).long()
            mask = self.torch.ones_like(ids)
            more: dict[str, Any] = {}
            if "assistant_model" in self.options:  # the assistant encodes the source itself
                more["input_ids"], middle = ids, begun
            else:
                more["encoder_outputs"] = self.model.encoder(input_ids=ids, attention_mask=mask)
                middle = time.perf_counter()
            self.calls = 0
            found = self.model.generate(
                **more,
                **self.options,
                attention_mask=mask,
                max_new_tokens=WIDTH,
                do_sample=False,
                num_beams=1,
                logits_processor=LogitsProcessorList([Force()]),
            )
            after = time.perf_counter()
        wrote = found[0, 1:].tolist()
        assert wrote == expected, f"{self.name} wrote {wrote}, not {expected}"
        return Measured(middle - begun, after - middle, self.calls)


WIDTH = 128  # most tokens of an answer
GRID = Pipelined(delay=1, time_max=64, sub_max=20)


def read(file: str, tokenizer: Tokenizer, *, count: int, most: int) -> list[Document]:
    """Reads up to `count` documents whose answers fit, spread evenly over the whole file."""
    fitting = []
    for text, targets in answers(file):
        rows = [ids for target in targets if (ids := tokenizer.encode(target))]
        line = tokenizer.encode(SEPARATOR.join(targets))
        ends = max((start(i, 1) + len(row) + 1 for i, row in enumerate(rows)), default=0)
        source = tokenizer.affixes.around(tokenizer.encode(text), most)
        if rows and len(rows) < GRID.sub_max and ends < GRID.time_max and len(line) < WIDTH:
            fitting.append(Document(np.asarray(source, np.int32), rows, line))
    if not fitting:
        raise UserError(file, found="no answer that fits", expected="at least one")
    return fitting[:: max(len(fitting) // count, 1)][:count]


def drawn(document: Document, tokens: np.ndarray, rng: np.random.Generator, known: bool) -> Document:
    """The document with a random answer of the same lengths.

    Args:
      document: the document.
      tokens: the tokens to draw from.
      rng: the generator of random numbers.
      known: whether tokens of the source may be drawn; otherwise only other tokens are.
    """
    tokens = np.setdiff1d(tokens, [EOS] if known else document.source)
    length = max(len(document.line), sum(map(len, document.rows)))
    chosen = rng.choice(tokens, length, replace=len(tokens) < length).tolist()
    rows, place = [], 0
    for row in document.rows:
        rows.append(chosen[place : place + len(row)])
        place += len(row)
    return Document(document.source, rows, chosen[: len(document.line)])


def prepared(config: T5Config, params: Any, weights: str) -> Prepared:
    """Prepares a T5 on the fastest backend."""
    model = T5(config, dtype=jnp.float32)
    backend = backends.fastest(config, model.dtype, weights)
    ready = jax.jit(lambda p: backend.prepare(model, p))(params)
    return Prepared(model, ready, backend)


def main(argv: Sequence[str]) -> int:
    """Measures the systems, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.drafts", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="JSON lines with source and targets")
    parser.add_argument("--tokenizer", required=True, metavar="DIR")
    parser.add_argument("--model", choices=SIZES, default="base")
    parser.add_argument("--small", choices=SIZES, default="small", help="the T5 that drafts (small)")
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), metavar="NAME,...", help=f"some of {', '.join(SYSTEMS)}"
    )
    parser.add_argument("--weights", choices=("float32", "int8"), default="float32", help="weights of pipejax")
    parser.add_argument("--documents", type=cli.whole_number(1, 10**4), default=12, metavar="N")
    parser.add_argument("--rounds", type=cli.whole_number(1, 100), default=3, metavar="N")
    parser.add_argument(
        "--tokens", type=cli.whole_number(1, 64), default=8, metavar="D", help="tokens drafted in a call (8)"
    )
    parser.add_argument("--max-source", type=cli.whole_number(2, 2048), default=512, metavar="L")
    parser.add_argument("--answers", choices=ANSWERS, default=ANSWERS[0], help="tokens of the answers (gold)")
    parser.add_argument(
        "--threads", type=cli.whole_number(1, 256), default=2, metavar="N", help="threads of each system (2)"
    )
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    names = names_of("--systems", flags.systems, SYSTEMS)
    use_threads(flags.threads)
    compile_cache.use_cache()
    config = SIZES[flags.model]
    documents = read(flags.file, Tokenizer.load(Path(flags.tokenizer)), count=flags.documents, most=flags.max_source)
    if (most := max(max(d.source.max(), *d.line) for d in documents)) >= config.vocab_size:
        raise UserError("--tokenizer", found=f"the id {most}", expected=f"ids of the model, below {config.vocab_size}")
    if flags.answers != "gold":
        rng = np.random.default_rng(0)
        known = flags.answers == "shuffled"
        documents = [drawn(d, d.source if known else np.arange(3, config.vocab_size), rng, known) for d in documents]
    with tempfile.TemporaryDirectory(prefix="pipejax-bench-") as scratch:
        systems = made(names, flags, config, Path(scratch), SpanFinder(Tokenizer.load(Path(flags.tokenizer))))
    progress = Progress("measuring", len(documents) * (flags.rounds + 1), unit="document")
    found: dict[str, list[list[Measured]]] = {system.name: [] for system in systems}
    for number in range(flags.rounds + 1):
        each: dict[str, list[Measured]] = {system.name: [] for system in systems}
        for i, document in enumerate(documents):
            shift = (number + i) % len(systems)
            for system in (*systems[shift:], *systems[:shift]):
                settle()
                each[system.name].append(system.run(document))
            progress.add(1)
        if number:
            for name, runs in each.items():
                found[name].append(runs)
    progress.close()
    results = [summary(name, rounds, found) for name, rounds in found.items()]
    print(table(results, documents, flags))
    if flags.json:
        command = "python -m lab.benchmarks.drafts " + " ".join(argv)
        save(flags.json, {"results": results, "machine": machine(flags.threads), "command": command})
    return 0


def made(names: Sequence[str], flags: Any, config: T5Config, scratch: Path, finder: SpanFinder) -> list[System]:
    """Builds the systems with these names."""
    params, small = random_params(config), random_params(SIZES[flags.small], 1)
    systems: list[System] = []
    ours = [name for name in names if not name.startswith("hf")]
    if ours:
        own = prepared(config, params, flags.weights)
        other = prepared(SIZES[flags.small], small, flags.weights) if any("model" in n for n in ours) else None
    for name in ours:
        inner: Pipelined | Sequential = GRID if name.startswith("pipelined") else Sequential(WIDTH)
        strategy: Strategy = inner
        if "+" in name:
            drafter = drafters.make(name.partition("+")[2])
            drafted = with_drafts(inner, Drafts(drafter, flags.tokens))
            costs = backends.call_costs(own.ready.decoding, own.backend)
            strategy = drafted.tuned_for(jax.default_backend(), costs=costs, skips_fillers=own.backend.skips_fillers)
        small_model = other if name.endswith("model") else None
        systems.append(Ours(name, own, strategy, bucket(flags.max_source), small_model, finder))
    if theirs := [name for name in names if name.startswith("hf")]:
        import torch
        from transformers import T5ForConditionalGeneration

        torch.set_num_threads(flags.threads)
        loaded = []
        for part, (architecture, weights) in {"own": (config, params), "small": (SIZES[flags.small], small)}.items():
            directory = write(architecture, weights, scratch / part)
            loaded.append(T5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval())
        systems += [HuggingFace(name, loaded[0], loaded[1], flags.tokens) for name in theirs]
    return systems


def summary(name: str, rounds: list[list[Measured]], all_rounds: dict[str, list[list[Measured]]]) -> dict[str, Any]:
    """The record of a system: means for an answer in the median round, and speed-ups over each other system."""

    def seconds(runs: list[Measured], whole: bool) -> float:
        return sum(r.decode_s + whole * r.encode_s for r in runs)

    count = len(rounds[0])
    return {
        "system": name,
        "calls": sum(r.calls for r in rounds[0]) / count,
        "decode_s": statistics.median(seconds(runs, False) for runs in rounds) / count,
        "seconds": statistics.median(seconds(runs, True) for runs in rounds) / count,
        "decodes_faster_than": {
            other: statistics.median(seconds(b, False) / seconds(a, False) for a, b in zip(rounds, runs, strict=True))
            for other, runs in all_rounds.items()
        },
        "faster_than": {
            other: statistics.median(seconds(b, True) / seconds(a, True) for a, b in zip(rounds, runs, strict=True))
            for other, runs in all_rounds.items()
        },
    }


def table(results: list[dict[str, Any]], documents: Sequence[Document], flags: Any) -> str:
    """The table as text; a system with drafts is compared with the same system without drafts."""
    tokens = statistics.mean(len(d.line) for d in documents)
    what = f"{len(documents)} documents, {tokens:.1f} tokens an answer, {flags.answers}"
    lines = [
        f"{what}; {flags.model}, ours in {flags.weights}; {flags.rounds} rounds",
        f"{'system':<20}{'calls':>7}{'decoding, s':>13}{'with encoder':>14}{'drafts decode':>15}{'with encoder':>14}",
    ]
    for result in results:
        plain = result["system"].partition("+")[0]
        ratios = (result[key].get(plain) for key in ("decodes_faster_than", "faster_than"))
        cells = "".join(f"{'' if r is None else f'{r:.2f}x':>{w}}" for r, w in zip(ratios, (15, 14), strict=True))
        lines.append(
            f"{result['system']:<20}{result['calls']:>7.1f}{result['decode_s']:>13.3f}{result['seconds']:>14.3f}{cells}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
