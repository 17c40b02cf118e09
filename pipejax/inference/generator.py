"""The Python API for decoding: from texts and records to records."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, NotRequired, TypedDict

import jax

from pipejax import config as config_lib
from pipejax import decoding, grid
from pipejax.config import Config
from pipejax.data.encoding import cut_source
from pipejax.data.text import split_rows, tells_rows_apart
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import TRUNCATIONS, Decoded, Drafted, Drafter, Pipelined, Sequential, Strategy
from pipejax.inference import programs, small, sources, streaming, wishes
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.inference.running_batch import Choice, RunningBatch
from pipejax.inference.sources import Source
from pipejax.inference.streaming import RowEvent
from pipejax.inference.wishes import Rows
from pipejax.model.precision import compute_dtype
from pipejax.system.errors import UserError


class Record(TypedDict):
    """What a source was decoded to; a line of what `pipejax decode` writes."""

    id: str | int  # as given; else the position
    text: str | None  # the rows, joined by `data.separator`; None without a tokenizer
    rows: list[str] | None
    row_ids: list[list[int]]  # token ids
    steps: int  # of Algorithm 1
    calls: int  # of the decoder: fewer than steps where no row was open, or where drafts were right
    truncated: str | None  # what cut it short, one of `decoding.TRUNCATIONS`
    repeated: NotRequired[list[int]]  # with `decode.unique_rows`: the numbers of the rows that were left out
    sample: NotRequired[int]  # with `decode.samples` above 1: the number of the answer, from 0
    log_prob: NotRequired[float]  # with `decode.scores`: of the whole answer, all rows and their eos
    log_probs: NotRequired[list[list[float]]]  # with `decode.scores`: of each token of `row_ids`
    trace: NotRequired[list[list[decoding.Asked]]]  # with `decode.trace`: of each call, what was drafted and accepted
    pieces: NotRequired[dict[str, str]]  # with `decode.trace` and a tokenizer: by id, as texts, the tokens of both
    seconds: NotRequired[float]  # by `evaluation`, at batch size 1


def texts(record: Record) -> list[str]:
    """The texts of its rows, but those of tokens that are no text; it must have been decoded with a tokenizer."""
    assert record["rows"] is not None, "decoded without a tokenizer"
    return [row for row in record["rows"] if row.strip()]


WINDOW = 16  # batches that are read ahead and sorted by length


class Generator:
    """Parameters, tokenizer and settings, ready to decode.

    For everybody: `decode`, `stream_rows`, `warm_up`, `default_strategy`. The rest is what the commands are made of.
    """

    def __init__(
        self,
        config: Config,
        params: Any,
        tokenizer: Tokenizer | None,
        *,
        devices: Sequence[jax.Device] | None = None,
        backend: Backend = XLA,
    ) -> None:
        """`config.model` must be set; `devices`: None is `programs.devices`; `backend`: computes decoder steps."""
        if config.model is None:
            raise ValueError("config.model: found None; expected the architecture")
        self.config, self.architecture, self.tokenizer = config, config.model, tokenizer
        dtype = dtype_of(config)
        self.programs = Programs(config.model, dtype, devices=devices or programs.devices(), backend=backend)
        self.programs.set_params(params)
        self._small = small.load(config, self.programs)
        self._streams: dict[str, list[RunningBatch]] = {}  # of `stream_rows`, by strategy; each has one place
        self.origin: dict[str, Any] = {}  # the step and params_fp of the checkpoint that the weights are from

    @property
    def default_strategy(self) -> str:
        """The objective the weights were trained with; sequential for converted weights."""
        objective = self.config.train.objective
        return "sequential" if objective == "none" else objective

    def decode(
        self,
        given: Iterable[str | Sequence[int] | Mapping[str, Any]],
        *,
        strategy: str | None = None,
        batch_size: int | None = None,
        drafter: Drafter | None = None,
    ) -> list[Record]:
        """Decodes texts, lists of token ids (eos included) or records as the command reads them; gives a record each.

        Records are `{"id", "text", "rows", "row_ids", "steps", "calls", "truncated"}`; the id is the position, unless
        one is given. docs/decoding.md says what each field holds.

        Args:
          given: the sources.
          strategy: None: `default_strategy`.
          batch_size: on each device; None: `decode.batch_size`.
          drafter: one of your own instead of `decode.draft` (docs/drafting.md).

        Raises:
          UserError: an unknown strategy, an empty source, an id outside the vocabulary, text without a tokenizer.
        """
        if isinstance(given, str | bytes | Mapping) or hasattr(given, "columns"):
            raise UserError(f"sources: found {_kind(given)}; expected a list of texts, of token ids or of records")
        given = list(given)
        sources.check_fields(sources.fields_of(self.config), given, "sources")
        read = (self.source(value, f"source {i}", i) for i, value in enumerate(given))
        checked = list(self.samples_of(read, strategy))
        size = min(batch_size or self.config.decode.batch_size, 1 << max(len(checked) - 1, 0).bit_length())
        report = Report(other_steps=None)  # nobody reads this report, and to count those steps it would tokenise again
        return list(self.stream(checked, strategy=strategy, batch_size=size, report=report, drafter=drafter))

    def stream_rows(
        self, given: str | Sequence[int] | Mapping[str, Any], *, strategy: str | None = None
    ) -> Iterator[RowEvent | Record]:
        """Yields each token of one source's answer as its step ends, and the record in the end.

        An event is `(row, token, text, done)`: the text is that of the row so far; `done` says that the row has ended,
        by the eos that the token then is. Rows without a token have no events.

        Args:
          given: the source.
          strategy: None: `default_strategy`.

        Raises:
          UserError: as `decode`; and for beams, drafts, limits and prefixes, which a stream does not have.
        """
        yield from self.stream_source(self.source(given, "the source", 0), strategy or self.default_strategy)

    def stream_source(self, source: Source, strategy: str) -> Iterator[RowEvent | Record]:
        """As `stream_rows`, of a checked source; what a stream does not have is refused at once."""
        config, made = self.config.decode, self.make_strategy(strategy)
        if not isinstance(made, Pipelined | Sequential) or config.limit != "none":
            key = "draft" if isinstance(made, Drafted) else "limit" if config.limit != "none" else "beams"
            raise UserError(f"decode.{key}: found {getattr(config, key)}; a stream of rows expects none")
        if source.prefixes or source.max_rows is not None:
            raise UserError(f"source {source.id}: found row_prefixes or max_rows; a stream of rows expects neither")
        return self._streamed(source, strategy, made)

    def _streamed(self, source: Source, strategy: str, made: Pipelined | Sequential) -> Iterator[RowEvent | Record]:
        config, batches = self.config.decode, self._streams.setdefault(strategy, [])
        batch = next((batch for batch in batches if batch.free), None)
        if batch is None:
            forced = wishes.forced_of(self.rows_of(source, strategy), made)
            batch = batches[0].twin() if batches else RunningBatch(self.programs, made, 1, forced=forced)
            batches.append(batch)
        seed, ids, unique = wishes.seed_of(source, config.seed), self.ids_of(source), config.unique_rows
        choice = Choice(config.temperature, config.top_k, config.top_p, seed, config.scores)
        try:
            for event in streaming.events(batch, ids, choice, self.tokenizer, unique=unique):
                if isinstance(event, RowEvent):
                    yield event
                else:
                    scores = event.log_probs if config.scores else None
                    found = dataclasses.replace(event, calls=made.calls(event), log_probs=scores)
                    yield self.record(source, strategy, found, 0)
        except Exception:  # of the device, of memory: what the batch holds is lost
            batches.remove(batch)
            batch.clear()  # its twins share its programs, which know it
            raise

    def warm_up(
        self, lengths: Sequence[int], *, batch_sizes: Sequence[int] = (1, 2, 4, 8), strategy: str | None = None
    ) -> Report:
        """Compiles ahead what greedy decoding needs on one device for sources of so many tokens, in lists of so many.

        Sampling, scores, limits and named rows have programs of their own, which the first `decode` compiles.
        Programs of other lengths are still compiled when they are needed: lengths count as the next of 16, 24, 32, 48,
        64, 96, ... Returns what it took.
        """
        chosen, report = self.make_strategy(strategy or self.default_strategy), Report()
        for size in map(self.batch_size_for, batch_sizes):
            for length in (min(length, self.config.data.max_source) for length in lengths):
                self.programs.warm_up(chosen, batch_size=size, length=length, report=report)
        return report

    def source(self, value: Any, place: str, name: str | int) -> Source:
        """What is given, if it can be decoded; `name`: its id, if it has none.

        Raises:
          UserError: it cannot; `place` says where it is.
        """
        source = Source(name, value)
        if isinstance(value, Mapping):
            source = sources.of_record(value, place, name, self.config)
            place += ': "source_ids"' if "source_ids" in value else ""
        return sources.check(source, place, architecture=self.architecture, tokenizer=self.tokenizer)

    def samples_of(self, given: Iterable[Source], strategy: str | None) -> Iterator[Source]:
        """Yields each source as often as `decode.samples` says.

        Raises:
          UserError: the strategy cannot do what a source asks for.
        """
        name = strategy or self.default_strategy
        for source in given:
            self.rows_of(source, name)
            if name == "sequential":
                if len(source.prefixes) > 1 or source.max_rows is not None:
                    what = "max_rows" if source.max_rows is not None else "several row_prefixes"
                    raise UserError(f"source {source.id}: found {what} with sequential decoding; expected pipelined")
                if self.config.decode.beams > 1 and source.prefixes:
                    raise UserError(f"source {source.id}: found row_prefixes with beams; expected decode.beams = 1")
            yield from (source._replace(sample=k) for k in range(self.config.decode.samples))

    def stream(
        self,
        given: Iterable[Source],
        *,
        strategy: str | None,
        batch_size: int,
        report: Report,
        window: int = WINDOW,
        tick: Callable[[int], None] = lambda count: None,
        drafter: Drafter | None = None,
    ) -> Iterator[Record]:
        """Yields records in input order, reading `window` batches of checked sources ahead.

        Adds to `report` as it goes, and calls `tick` with the number of examples of each batch once it is decoded.
        """
        name = strategy or self.default_strategy
        chosen = self.make_strategy(name, drafter)
        separator = self._separator if name == "sequential" else []
        devices, wanted = self.programs.devices, batch_size
        batch_size = self.batch_size_for(wanted)
        window *= -(-wanted // batch_size)  # as far ahead as batches of the wanted size would read
        waiting, across = iter(given), 0
        while chunk := list(islice(waiting, batch_size * window)):
            across = across or min(len(devices), -(-len(chunk) // batch_size))
            encoded = [self.ids_of(source, report) for source in chunk]
            order = sorted(range(len(chunk)), key=lambda i: len(encoded[i]))
            records: dict[int, Record] = {}
            for first in range(0, len(order), across * batch_size):
                part = order[first : first + across * batch_size]
                ids = [encoded[i] for i in part]
                wished = wishes.of_batch(
                    [chunk[i] for i in part],
                    ids,
                    self.config.decode,
                    chosen,
                    rows=[self.rows_of(chunk[i], name) for i in part],
                    separator=separator,
                    vocabulary=self.architecture.vocab_size,
                )
                found = self.programs.decode(
                    ids, chosen, batch_size=batch_size, across=across, report=report, wishes=wished
                )
                begun = time.perf_counter()
                for b, i in enumerate(part):
                    records[i] = self.record(chunk[i], name, found, b)
                report.seconds += time.perf_counter() - begun
                for i in part:
                    self.count(records[i], name, report)
                tick(len(part))
            yield from (records[i] for i in range(len(chunk)))

    def batch_size_for(self, wanted: int) -> int:
        """How many sources a device decodes at a time when so many are wanted: on a CPU a few at most."""
        on_cpu = self.programs.devices[0].platform == "cpu"
        return min(wanted, programs.CPU_BATCH) if on_cpu else wanted

    def make_strategy(self, name: str, drafter: Drafter | None = None) -> Strategy:
        """The strategy of that name with this config's settings; `drafter`: instead of the config's."""
        bos, eos = self.architecture.decoder_start_token_id, self.architecture.eos_token_id
        made = decoding.make(name, self.config.grid, self.config.decode, bos=bos, eos=eos, drafter=drafter)
        small.check(self._small, made, name, self.config.grid)
        return self.programs.for_drafts(made) if isinstance(made, Drafted) else made

    def ids_of(self, source: Source, report: Report | None = None) -> Sequence[int]:
        """Its token ids, as many as the encoder takes; the report counts those that were cut."""
        given = source.content
        if isinstance(given, str):
            assert self.tokenizer is not None  # `check` saw to it
            content = [*self.tokenizer.encode(given), self.architecture.eos_token_id]
        else:
            content = [int(i) for i in given]
        cut = cut_source(content, self.config.data.max_source)
        if report:
            report.cut_sources += len(cut) < len(content)
        return cut

    def rows_of(self, source: Source, strategy: str) -> Rows:
        """What is known of the rows of its answer; raises a UserError if too little to start all at once."""
        return wishes.rows_of(source, strategy, self.config.grid, self.tokenizer)

    @cached_property
    def _separator(self) -> list[int]:
        """The ids that part the rows of a sequential answer."""
        if self.tokenizer is None:
            return []
        between = self.config.data.separator
        letter, begun, whole = (self.tokenizer.encode(text) for text in ("a", f"a{between}", f"a{between}a"))
        if begun[: len(letter)] != letter or whole[: len(letter)] != letter:
            return whole
        # What follows has other ids after a separator that ends within a word, so it is told by what comes before.
        parts = begun[len(letter) :]
        joined = whole[: len(begun)] != begun  # its end becomes one token with what follows
        return [*dict.fromkeys(parts + whole[len(letter) :])] if joined else parts

    def record(self, source: Source, strategy: str, found: Decoded, place: int, *, ends: bool = True) -> Record:
        """What an example was decoded to.

        Args:
          source: of the example.
          strategy: that decoded it.
          found: in NumPy, calls included.
          place: of the example in the batch.
          ends: whether `log_prob` counts what follows the last token of each row, its eos.
        """
        separator = self.config.data.separator
        rows = list(zip(found.tokens[place], found.lengths[place].tolist(), strict=True))
        exist, told = len(rows), found.log_probs is not None or found.trace is not None
        if told and strategy == "pipelined" and self.config.grid.delay == 0:  # unnamed rows end as they begin
            exist = self.rows_of(source, strategy).most or 0
        kept = [(i, row[:n].tolist()) for i, (row, n) in enumerate(rows) if n or strategy == "sequential"]
        unique = self.config.decode.unique_rows
        repeated = [i for k, (i, row) in enumerate(kept) if unique and row in (above for _, above in kept[:k])]
        kept = [(i, row) for i, row in kept if i not in repeated]
        text: str | None = None
        said: list[str] | None = None
        if self.tokenizer is not None:
            said = [self.tokenizer.decode(row) for _, row in kept]
            text = separator.join(row for row in said if row.strip() or strategy == "sequential")
            said = split_rows(text, separator) if strategy == "sequential" else said
            if unique and strategy == "sequential":
                repeated = [k for k, row in enumerate(said) if row in said[:k]]
                said = [*dict.fromkeys(said)]
        record: Record = {
            "id": source.id,
            "text": text,
            "rows": said,
            "row_ids": [row for _, row in kept],
            "steps": int(found.steps[place]),
            "calls": int(found.calls[place]),
            "truncated": TRUNCATIONS[int(found.truncated[place])],
        }
        if unique:
            record["repeated"] = repeated
        if self.config.decode.samples > 1:
            record["sample"] = source.sample
        if found.log_probs is not None:
            delay = self.config.grid.delay if strategy == "pipelined" else 1
            by_time, first = found.log_probs[place], [int(grid.start(i, delay)) for i in range(len(rows))]
            record["log_probs"] = [by_time[i, first[i] : first[i] + len(row)].tolist() for i, row in kept]
            spans = [slice(first[i], first[i] + n + ends) for i, (_, n) in enumerate(rows[:exist])]
            record["log_prob"] = sum(float(by_time[i, span].sum()) for i, span in enumerate(spans))
        if found.trace is not None:
            calls = decoding.listed(found.trace, place, record["calls"])
            # Rows are numbered as in `row_ids`: one without a token may stand before others (grid.stop=literal).
            last = kept[-1][0] if kept else -1
            later = [row for row in range(last + 1, exist) if row not in repeated]
            numbers = {row: k for k, row in enumerate([*(row for row, _ in kept), *later])}
            record["trace"] = [[x._replace(row=numbers[x.row]) for x in call if x.row in numbers] for call in calls]
            if self.tokenizer is not None:
                seen = {*chain(*record["row_ids"]), *chain(*(one.drafted for call in record["trace"] for one in call))}
                record["pieces"] = {str(i): self.tokenizer.piece(i) for i in sorted(seen)}
        return record

    def count(self, record: Record, strategy: str, report: Report) -> None:
        """Adds a record to the report."""
        report.examples += 1
        report.steps += record["steps"]
        report.calls += record["calls"]
        report.repeated += len(record.get("repeated", ()))
        if record["truncated"]:
            report.truncated[record["truncated"]] += 1
        if report.other_steps is None:
            return
        parted = tells_rows_apart(self.config.data.separator)
        if strategy != "sequential":
            lengths = [len(row) for row in record["row_ids"]]
            report.other_steps += grid.sequential_steps(lengths, separator=parted)
        elif self.tokenizer is None or not parted:  # where a row ends cannot be seen
            report.other_steps = None
        else:
            lengths = [len(self.tokenizer.encode(row)) for row in texts(record)]
            delay = self.config.grid.delay
            report.other_steps += grid.pipelined_steps(
                lengths, delay=delay, sub_max=config_lib.GRID, time_max=config_lib.GRID**2
            )  # no bounds


def dtype_of(config: Config) -> Any:
    """The dtype that decoding computes in."""
    return compute_dtype("float32" if config.decode.weights == "float32" else config.decode.dtype)


def _kind(given: Any) -> str:
    if isinstance(given, str | bytes):
        return "a text"
    return f"one record ({type(given).__name__})" if isinstance(given, Mapping) else f"a table ({type(given).__name__})"
