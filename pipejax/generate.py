"""The only place where the T5 meets a decoding strategy, and the Python API for decoding.

Shapes: B batch, L source length (a bucket).
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import checkpoint, decoding, grid, lora, native, packed
from pipejax import config as config_lib
from pipejax.config import Config
from pipejax.data.core import bucket, cut_source, pad
from pipejax.decoding import TRUNCATIONS, Decoded, Schedule, Strategy
from pipejax.errors import UserError
from pipejax.fingerprint import digest
from pipejax.report import Report
from pipejax.t5 import T5, Memory, cast_params
from pipejax.tokenizer import Tokenizer

Record = dict[str, Any]
# What `--set` may change when a checkpoint is decoded: sections and keys.
DECODING_KEYS = ("grid", "decode", "data.max_source", "data.separator")
WINDOW = 16  # batches that are read ahead and sorted by length
QUERIES = (8, 20, 48, 128)  # live rows of a step over the whole batch, on a CPU
PREFIXES = (160, 448)  # cache slots in reach


class Source(NamedTuple):
    """One thing to decode: text or token ids (eos included)."""

    id: str | int
    content: str | Sequence[int]


def split_rows(text: str, separator: str) -> list[str]:
    """The rows of a sequential text. Spaces alone separate nothing; at either end a separator may lack its spaces."""
    if not separator.strip(" "):
        return [text] if text else []
    parts = re.split(separator_pattern(separator), text)
    return [row for row in map(str.strip, parts) if row]


def separator_pattern(separator: str) -> str:
    """Matches the separator; tokenizers are free with the number of spaces around it, and with those at the ends."""
    core = separator.strip(" ")
    before = r"(?:^| +|(?<= ))" if separator.startswith(" ") else ""
    after = r"(?:$| +)" if separator.endswith(" ") else ""
    return before + re.escape(core) + after


def compute_dtype(name: str) -> jnp.dtype:
    """The dtype of that name; "auto" is bfloat16 where the hardware has it, float32 on a CPU."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


@flax.struct.dataclass
class Ready:
    """A T5's parameters as decoding reads them."""

    encoding: Any  # those of the encoder and of the cross-attention's keys and values
    decoding: packed.Weights


def prepare(model: T5, params: Any, *, in_panels: bool = False) -> Ready:
    """Merges low-rank factors, casts to the model's dtype, lays the decoder's out (`packed.lay_out`). Jit-able."""
    params = cast_params(lora.merge_factors(params), model.dtype)
    weights = packed.lay_out(model.config, params, model.dtype, in_panels=in_panels)
    projections = {
        name: {"cross_attention": {key: layer["cross_attention"][key] for key in ("key", "value")}}
        for name, layer in params["decoder"].items()
        if name.startswith("layers_")
    }
    encoding = {"shared": params["shared"], "encoder": params["encoder"], "decoder": projections}
    return Ready(encoding, weights)


def schedule(strategy: Strategy, batch: int) -> Schedule:
    """The sizes that a decode goes through here, each pair of them a piece of program to compile.

    On a CPU every row costs; on other devices rows are nearly free, and what costs is another loop.
    """
    if jax.default_backend() == "cpu":
        return Schedule.fit(strategy, batch, queries=QUERIES, prefixes=PREFIXES)
    return Schedule.fit(strategy, batch, prefixes=PREFIXES[-1:])


def memory_length(length: int) -> int:
    """The padded length of a memory: a power of two, so that fewer decoders compile than encoders."""
    return max(1 << (length - 1).bit_length(), 64)


def encode_batch(model: T5, params: Any, source: jax.Array, length: jax.Array, *, in_panels: bool = False) -> Memory:
    """Encodes one padded batch; `model` and `in_panels` are static under jit.

    Args:
      model: the T5.
      params: those of `Ready.encoding`.
      source: i32 [B, L].
      length: i32 [B], real tokens of each source.
      in_panels: as in `prepare`.

    Returns:
      a memory of `memory_length(L)`.
    """
    mask = jnp.arange(source.shape[1]) < length[:, None]
    memory: Any = model.apply({"params": params}, source, mask, method="encode")
    more = memory_length(source.shape[1]) - source.shape[1]
    memory = Memory(
        keys=tuple(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more))) for x in memory.keys),
        values=tuple(jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0))) for x in memory.values),
        mask=jnp.pad(memory.mask, ((0, 0), (0, more))),
    )
    return packed.memory_in_panels(memory) if in_panels else memory


def decode_batch(
    model: T5, strategy: Strategy, weights: packed.Weights, memory: Memory, *, sizes: Schedule | None = None
) -> Decoded:
    """Decodes an encoded batch; `model`, `strategy` and `sizes` (None: as `schedule` has them) are static under jit."""
    batch = memory.mask.shape[0]
    decoder = packed.PackedDecoder(model.config, weights, memory, model.dtype)
    return decoding.run(strategy, decoder, strategy.init(batch), schedule=sizes or schedule(strategy, batch))[0]


class Generator:
    """Parameters, tokenizer and settings, ready to decode. One compiled program a strategy and shape."""

    def __init__(self, config: Config, params: Any, tokenizer: Tokenizer | None, *, own_kernel: bool = False) -> None:
        """`config.model` must be set; `params` are float32; `own_kernel`: what `native.use` said."""
        if config.model is None:
            raise ValueError("config.model: found None; expected the architecture")
        self.config, self.architecture, self.tokenizer = config, config.model, tokenizer
        self.model = T5(config.model, dtype=compute_dtype(config.decode.dtype))
        self._in_panels = own_kernel
        self._prepare = jax.jit(partial(prepare, self.model, in_panels=own_kernel))
        self.set_params(params)
        self._programs: dict[tuple[Strategy | Literal["encoder"], tuple[int, int]], Any] = {}
        self.log: Callable[[str], None] = lambda line: None  # is told what compiles
        self.origin: dict[str, Any] = {}  # the step and params_fp of the checkpoint that the weights are from

    def set_params(self, params: Any) -> None:
        """Other weights of the same architecture; nothing compiles again."""
        self.ready: Ready = self._prepare(params)

    def forget_params(self) -> None:
        """Gives their memory back, until `set_params`; what was compiled stays."""
        del self.ready

    @property
    def default_strategy(self) -> str:
        """The objective the weights were trained with; sequential for converted weights."""
        objective = self.config.train.objective
        return "sequential" if objective == "none" else objective

    def decode(
        self, sources: Iterable[str | Sequence[int]], *, strategy: str | None = None, batch_size: int | None = None
    ) -> list[Record]:
        """Decodes texts, or lists of token ids (eos included), and returns a record each, in order.

        Records are `{"id", "text", "rows", "row_ids", "steps", "truncated"}`; the id is the position. See the README.

        Raises:
          UserError: an unknown strategy, an empty source, an id outside the vocabulary, text without a tokenizer.
        """
        if isinstance(sources, str):
            raise UserError("sources: found a text; expected a list of them")
        checked = [self.check(Source(i, s), f"source {i}") for i, s in enumerate(sources)]
        size = min(batch_size or self.config.decode.batch_size, max(len(checked), 1))
        return list(self.stream(checked, strategy=strategy, batch_size=size, report=Report()))

    def check(self, source: Source, place: str) -> Source:
        """The source if it can be decoded; `place` names it in the UserError otherwise."""
        content = source.content
        if isinstance(content, str):
            if self.tokenizer is None:
                raise UserError(f"{place}: found text, but the checkpoint has no tokenizer; expected source_ids")
            if not content.strip():
                raise UserError(f"{place}: found an empty text; expected some")
            return source
        if isinstance(content, bytes) or not isinstance(content, Sequence | np.ndarray):
            raise UserError(f"{place}: found {type(content).__name__}; expected text or a list of ids")
        if not len(content):
            raise UserError(f"{place}: found no ids; expected at least one")
        for i in content:
            if isinstance(i, bool) or not isinstance(i, int | np.integer):
                raise UserError(f"{place}: found {i!r} among the ids; expected whole numbers")
            if not 0 <= i < self.architecture.vocab_size:
                raise UserError(f"{place}: found id {i}; expected 0 to {self.architecture.vocab_size - 1}")
        return source

    def stream(
        self,
        sources: Iterable[Source],
        *,
        strategy: str | None,
        batch_size: int,
        report: Report,
        window: int = WINDOW,
        tick: Callable[[int], None] = lambda count: None,
    ) -> Iterator[Record]:
        """Yields records in input order, reading `window` batches of checked sources ahead.

        Adds to `report` as it goes, and calls `tick` with the number of examples of each batch once it is decoded.
        """
        name = strategy or self.default_strategy
        chosen = self.strategy(name)
        waiting = iter(sources)
        while chunk := list(islice(waiting, batch_size * window)):
            encoded = [self._encode(source, report) for source in chunk]
            order = sorted(range(len(chunk)), key=lambda i: len(encoded[i]))
            records: dict[int, Record] = {}
            for first in range(0, len(order), batch_size):
                part = order[first : first + batch_size]
                results = self._decode_part([encoded[i] for i in part], chosen, batch_size, report)
                begun = time.perf_counter()
                for i, (row_ids, steps, truncated) in zip(part, results, strict=True):
                    records[i] = self._record(chunk[i].id, name, row_ids, steps, truncated)
                report.seconds += time.perf_counter() - begun
                for i in part:
                    self._count(records[i], name, report)
                tick(len(part))
            yield from (records[i] for i in range(len(chunk)))

    def strategy(self, name: str) -> Strategy:
        """The strategy of that name with this config's settings."""
        bos, eos = self.architecture.decoder_start_token_id, self.architecture.eos_token_id
        return decoding.make(name, self.config.grid, self.config.decode, bos=bos, eos=eos)

    def _encode(self, source: Source, report: Report) -> Sequence[int]:
        content = source.content
        if isinstance(content, str):
            assert self.tokenizer is not None  # `check` saw to it
            content = [*self.tokenizer.encode(content), self.architecture.eos_token_id]
        cut = cut_source(content, self.config.data.max_source)
        report.cut_sources += len(cut) < len(content)
        return cut

    def _decode_part(
        self, sources: list[Sequence[int]], strategy: Strategy, batch_size: int, report: Report
    ) -> list[tuple[list[list[int]], int, str | None]]:
        """Rows, steps and truncation of each source; a short part is filled up with copies of its last one."""
        filled = [*sources, *[sources[-1]] * (batch_size - len(sources))]
        lengths = np.asarray([len(s) for s in filled], np.int32)
        source = pad([np.asarray(s, np.int32) for s in filled], bucket(int(lengths.max())))
        encode = self._program("encoder", source.shape, (self.ready.encoding, source, lengths), report)
        begun = time.perf_counter()
        memory = encode(self.ready.encoding, source, lengths)
        if (strategy, memory.mask.shape) not in self._programs:
            jax.block_until_ready(memory)  # else it ends while the decoder compiles, and nobody counts it
        report.seconds += time.perf_counter() - begun
        decode = self._program(strategy, memory.mask.shape, (self.ready.decoding, memory), report)
        begun = time.perf_counter()
        decoded = jax.device_get(decode(self.ready.decoding, memory))
        report.seconds += time.perf_counter() - begun
        return [
            (
                [row[:n].tolist() for row, n in zip(decoded.tokens[b], decoded.lengths[b], strict=True)],
                int(decoded.steps[b]),
                TRUNCATIONS[int(decoded.truncated[b])],
            )
            for b in range(len(sources))
        ]

    def _program(
        self, part: Strategy | Literal["encoder"], shape: tuple[int, int], arguments: tuple[Any, ...], report: Report
    ) -> Any:
        """The compiled encoder or decoder for batches of that shape, [B, L]."""
        if (part, shape) not in self._programs:
            begun = time.perf_counter()
            function: Callable[..., Any] = partial(encode_batch, self.model, in_panels=self._in_panels)
            name: str = "encoder"
            if not isinstance(part, str):
                name, function = f"{type(part).__name__.lower()} decoder", partial(decode_batch, self.model, part)
            if self.architecture.num_layers + self.architecture.num_decoder_layers > 8:  # takes seconds
                self.log(f"preparing the {name} for batches of {shape[0]} with sources of up to {shape[1]} tokens")
            self._programs[part, shape] = jax.jit(function).lower(*arguments).compile()
            report.compile_seconds += time.perf_counter() - begun
            report.shapes += 1
        return self._programs[part, shape]

    def _record(
        self, name: str | int, strategy: str, row_ids: list[list[int]], steps: int, truncated: str | None
    ) -> Record:
        separator = self.config.data.separator
        text: str | None = None
        rows: list[str] | None = None
        if strategy != "sequential":
            row_ids = [row for row in row_ids if row]
        if self.tokenizer is not None:
            rows = [self.tokenizer.decode(row) for row in row_ids]
            text = separator.join(rows)
            if strategy == "sequential":
                rows = split_rows(text, separator)
        return {"id": name, "text": text, "rows": rows, "row_ids": row_ids, "steps": steps, "truncated": truncated}

    def _count(self, record: Record, strategy: str, report: Report) -> None:
        report.examples += 1
        report.steps += record["steps"]
        if record["truncated"]:
            report.truncated[record["truncated"]] += 1
        if report.other_steps is None:
            return
        parted = bool(self.config.data.separator.strip())
        if strategy != "sequential":
            lengths = [len(row) for row in record["row_ids"]]
            report.other_steps += grid.sequential_steps(lengths, separator=parted)
        elif self.tokenizer is None or not parted:  # where a row ends cannot be seen
            report.other_steps = None
        else:
            lengths = [len(self.tokenizer.encode(row)) for row in record["rows"]]
            delay = self.config.grid.delay
            report.other_steps += grid.pipelined_steps(lengths, delay=delay, sub_max=config_lib.GRID, time_max=2**30)


def load(
    path: str | Path, *, best: bool = False, overrides: Sequence[str] = (), log: Callable[[str], None] = print
) -> Generator:
    """Opens the newest good step of a checkpoint or run directory (`best`: of its best/).

    Args:
      path: what `pipejax.convert from-hf` or `train.py` wrote.
      best: take the best evaluated step.
      overrides: `key=value` settings of the sections grid and decode, data.max_source and data.separator.
      log: called with each line worth saying.

    Raises:
      UserError: no such directory, no good step in it, or an override that does not fit.
    """
    for assignment in overrides:
        key = assignment.partition("=")[0].strip()
        section = key.partition(".")[0]
        if hasattr(Config(), section) and not {section, key} & {*DECODING_KEYS}:
            raise UserError(
                f"--set {assignment}: {key} cannot change when a checkpoint is decoded; expected one of "
                f"{', '.join(DECODING_KEYS)}"
            )
    restored = checkpoint.open_run(path, best=best, log=log)
    config = config_lib.override(restored.config, overrides)
    tokenizer_files = restored.tokenizer_files()
    tokenizer = Tokenizer.load(tokenizer_files) if tokenizer_files else None
    generator = Generator(config, restored.items["params"], tokenizer, own_kernel=native.use(log=log))
    generator.origin = {"step": restored.step, "params_fp": digest(restored.arrays["params"])}
    return generator
