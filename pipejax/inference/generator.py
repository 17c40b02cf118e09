"""The Python API for decoding: from texts and records to records."""

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax

from pipejax import methods
from pipejax.config import Config
from pipejax.data.encoding import encode_source
from pipejax.data.formats import rows_in
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Decoded, Drafter, Strategy, Wishes, ends_of
from pipejax.inference import programs, small, sources, streaming, wishes
from pipejax.inference import schema as schema_lib
from pipejax.inference import settings as settings_lib
from pipejax.inference.answers import Record, count, record_of
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.opened import Opened, dtype_of
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.inference.running_batch import RunningBatch
from pipejax.inference.sources import Source
from pipejax.inference.streaming import RowEvent
from pipejax.methods import Ids, Method
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)

WINDOW = 16  # batches that are read ahead and sorted by length


class Generator:
    """Parameters, tokenizer and settings, ready to decode.

    For everybody: `decode`, `stream_rows`, `under`, `warm_up`, `adapted`, `default_strategy`. The rest is for the
    commands. The weights are laid out when the first source is decoded; what is given is checked before.
    """

    def __init__(
        self,
        config: Config,
        params: Any,
        tokenizer: Tokenizer | None,
        *,
        devices: Sequence[jax.Device] | None = None,
        backend: Backend | None = XLA,
    ) -> None:
        """Nothing runs on a device yet.

        Args:
          tokenizer: None: sources and answers are ids.
          devices: None: `programs.devices`.
          backend: computes the encoder and the decoder's steps; None: the fastest on this machine.
        """
        if config.model is None:
            raise ValueError("config.model: found None; expected the architecture")
        self.config, self.architecture, self.tokenizer = config, config.model, tokenizer
        self._devices = list(devices or programs.devices())
        self._opened = Opened(config, params, self._devices, backend)
        # Of `stream_rows`, by strategy and method, which may name rows; each has one place.
        self._streams: dict[tuple[Strategy, Method], list[RunningBatch]] = {}
        self.checkpoint = ""  # the directory that the weights are from
        self.origin: dict[str, Any] = {}  # its step, and params_fp
        self.learned = ""  # the fingerprint of its training examples; "": unknown
        self.trained: Config | None = None  # that they were trained with; None: unknown
        self._told: set[str] = set()  # lines that are logged once
        self._asked: frozenset[str] = frozenset()  # keys of the settings that a call gave
        self.schema: schema_lib.Schema | None = None  # that answers follow: see `under`
        self._schemas = schema_lib.Schemas()
        self.adapters: dict[str, Generator] = {}  # by name, each with the weights and programs of this one
        self.adapter: int | None = None  # the number of its own, 0 for the base; None: there are no adapters

    def __repr__(self) -> str:
        model, of = self.architecture, f" of {self.checkpoint} at step {self.origin['step']}" if self.checkpoint else ""
        held = self.config.decode.weights if self.config.decode.weights != "auto" else dtype_of(self.config).name
        kind = type(model).__name__.removesuffix("Config")
        return (
            f"<Generator{of}: {kind} of {self._opened.size / 1e6:.1f} M parameters, "
            f"{model.num_layers} + {model.num_decoder_layers} layers, vocabulary {model.vocab_size}; "
            f"{self.default_strategy}; {held} on {len(self._devices)} x {self._devices[0].device_kind}>"
        )

    @property
    def programs(self) -> Programs:
        """The weights on the devices, and what is compiled for them; made when they are first asked for."""
        return self._opened.programs

    @property
    def default_strategy(self) -> str:
        """The method that the weights were trained for; sequential for converted weights."""
        return methods.default(self.config)

    def adapted(self, name: str) -> "Generator":
        """Decodes with the adapter of that name, and with the settings that it was trained with.

        Raises:
          UserError: `load` was given none of that name.
        """
        if name not in self.adapters:
            raise UserError(f"adapter: found {name!r}; expected {' or '.join(self.adapters) or 'none'}")
        return self.adapters[name]

    @property
    def ids(self) -> Ids:
        """The token ids that rows begin and end with."""
        return Ids.of(self.architecture)

    def method(self, name: str | None = None) -> Method:
        """The method of that name with this config's settings; None: `default_strategy`."""
        return methods.make(name or self.default_strategy, self.config)

    def decode(
        self,
        given: Iterable[str | Sequence[int] | Mapping[str, Any]],
        *,
        strategy: str | None = None,
        batch_size: int | None = None,
        drafter: Drafter | None = None,
        schema: Mapping[str, object] | str | Path | None = None,
        **settings: Any,
    ) -> list[Record]:
        """Decodes texts, lists of token ids or records as the command reads them; gives a record each.

        Records are `{"id", "text", "rows", "row_ids", "steps", "calls", "truncated"}`; the id is the position, unless
        one is given. docs/decoding.md says what each field holds.

        Args:
          given: the sources: a list, a data frame or another table whose rows are records. Token ids hold the
            special ones, such as the eos.
          strategy: the name of a method, such as "sequential"; None: `default_strategy`.
          batch_size: on each device; None: `decode.batch_size`.
          drafter: one of your own instead of `decode.draft` (docs/drafting.md).
          schema: a flat JSON schema, or its file: the text of each record is an object of it (docs/schemas.md).
          settings: values of this call alone for keys of the sections decode and grid, such as temperature=0.7. The
            weights stay as they are; a program is compiled only if none has the same strategy and sizes.

        Raises:
          UserError: an unknown strategy or setting, a value out of its range, an empty source, an id outside the
            vocabulary, text without a tokenizer, a schema that rows cannot follow.
        """
        if isinstance(given, str | bytes | Mapping):
            raise UserError(f"sources: found {_kind(given)}; expected a list of texts, of token ids or of records")
        own = self._with("decode", settings if batch_size is None else {**settings, "batch_size": batch_size})
        own = own if schema is None else own.under(schema, strategy)
        given = list(rows_in(given, "sources"))
        sources.check_fields(sources.fields_of(self.config), given, "sources")
        read = (own.source(value, f"source {i}", i) for i, value in enumerate(given))
        checked = list(own.samples_of(read, strategy))
        size = min(own.config.decode.batch_size, 1 << max(len(checked) - 1, 0).bit_length())
        report = Report(other_steps=None)  # nobody reads this report, and to count those steps it would tokenise again
        return list(own.stream(checked, strategy=strategy, batch_size=size, report=report, drafter=drafter))

    def stream_rows(
        self, given: str | Sequence[int] | Mapping[str, Any], *, strategy: str | None = None, **settings: Any
    ) -> Iterator[RowEvent | Record]:
        """Yields each token of one source's answer as its step ends, and the record in the end.

        An event is `(row, token, text, done)`: the text is that of the row so far; `done` says that the row has ended,
        by the end token that the token then is. Rows without a token have no events.

        Args:
          given: the source.
          strategy: the name of a method, such as "sequential"; None: `default_strategy`.
          settings: as of `decode`.

        Raises:
          UserError: as `decode`; and for beams, limits and prefixes, which a stream does not have.
        """
        own = self._with("stream_rows", settings, batch_size="none: one source", samples="none: one answer")
        return own.stream_source(own.source(given, "the source", 0), strategy or self.default_strategy)

    def stream_source(self, source: Source, strategy: str) -> Iterator[RowEvent | Record]:
        """As `stream_rows`, of a checked source; what a stream does not have is refused at once."""
        config, method = self.config.decode, self.method(strategy)
        method.require("stream")
        if config.limit != "none":
            raise UserError(f"decode.limit: found {config.limit}; a stream of rows expects none")
        if source.prefixes or source.max_rows is not None:
            raise UserError(f"source {source.id}: found row_prefixes or max_rows; a stream of rows expects neither")
        return self._stream(source, method, self.make_strategy(strategy))

    def _stream(self, source: Source, method: Method, made: Any) -> Iterator[RowEvent | Record]:
        config, batches = self.config.decode, self._streams.setdefault((made, method), [])
        batch = next((batch for batch in batches if batch.free), None)
        if batch is None:
            batch = batches[0].twin() if batches else RunningBatch(self.programs, made, 1)
            batches.append(batch)
        rows = wishes.rows_of(source, method, self.tokenizer, self.ids.ends)
        batch.give(wishes.forced_of(rows, made), source.schema)
        ids, sampling = self.ids_of(source), wishes.sampling_of(source, config)
        wanted = {"log_probs": config.scores, "unique": config.unique_rows}
        try:
            for event in streaming.events(batch, ids, sampling, self.tokenizer, adapter=self.adapter, **wanted):
                if isinstance(event, RowEvent):
                    yield event
                else:
                    scores = event.log_probs if config.scores else None
                    found = dataclasses.replace(event, calls=made.calls(event), log_probs=scores)
                    yield self._record(source, method, made, found, 0)
        except Exception:  # of the device, of memory: what the batch holds is lost
            batches.remove(batch)
            batch.clear()  # its twins share its programs, which know it
            raise

    def warm_up(
        self,
        lengths: Sequence[int],
        *,
        batch_sizes: Sequence[int] = (1, 2, 4, 8),
        strategy: str | None = None,
        **settings: Any,
    ) -> Report:
        """Compiles ahead what decoding with these settings needs on one device.

        A temperature, scores, a limit and rows that begin as told have programs of their own. Programs of other lengths
        are still compiled when they are needed: lengths count as the next of 16, 24, 32, 48, 64, 96, ...

        Args:
          lengths: of sources, in tokens.
          batch_sizes: of lists.
          strategy: the name of a method, such as "sequential"; None: `default_strategy`.
          settings: as of `decode`.

        Returns:
          what it took.
        """
        own, report = self._with("warm_up", settings, batch_size="batch_sizes, a list"), Report()
        method, chosen = own.method(strategy), own.make_strategy(strategy)
        for size in map(own.batch_size_for, batch_sizes):
            for length in (min(length, own.config.data.max_source) for length in lengths):
                ids = [own.architecture.eos_token_id] * length
                wished = own._wishes([Source("", ids)] * size, [ids] * size, method, chosen)
                own.programs.warm_up(
                    chosen, batch_size=size, length=length, report=report, wishes=wished, adapter=own.adapter
                )
        return report

    def _with(self, call: str, settings: Mapping[str, Any], **without: str) -> "Generator":
        """The same weights and programs with other settings, for a call of that method; see `settings.of_call`."""
        if not settings:
            return self
        other, drafts = copy.copy(self), self._opened.small is not None
        other.config = settings_lib.of_call(self.config, call, settings, drafts=drafts, without=without)
        other._asked = self._asked | {settings_lib.NAMES[name] for name in settings}
        return other

    def under(
        self,
        given: Mapping[str, object] | str | Path,
        strategy: str | None = None,
        *,
        effort: schema_lib.Effort | None = schema_lib.WHOLE,
        pause: Callable[[], None] | None = None,
    ) -> "Generator":
        """The same weights and programs, with answers that follow a JSON schema or file; a UserError if they cannot.

        For `effort` and `pause` see `Schemas.find`.
        """
        made = self.make_strategy(strategy, drafts=False)
        other, method = copy.copy(self), self.method(strategy)
        other.schema = self._schemas.find(given, method, made, self.config, self.tokenizer, effort=effort, pause=pause)
        return other

    def source(self, value: Any, place: str, name: str | int) -> Source:
        """The value as a source (`name`: its id, if it has none); a UserError at `place` if it cannot be decoded."""
        source = Source(name, value)
        if isinstance(value, Mapping):
            source = sources.of_record(value, place, name, self.config)
            place += ': "source_ids"' if "source_ids" in value else ""
        checked = sources.check(source, place, architecture=self.architecture, tokenizer=self.tokenizer)
        return checked._replace(schema=self.schema)

    def samples_of(self, given: Iterable[Source], strategy: str | None) -> Iterator[Source]:
        """Yields each source `decode.samples` times; a UserError if the strategy cannot do what a source asks for."""
        method = self.method(strategy)
        for source in given:
            wishes.rows_of(source, method, self.tokenizer, self.ids.ends)
            if len(source.prefixes) > 1 or source.max_rows is not None:
                found = "max_rows" if source.max_rows is not None else "several row_prefixes"
                method.require("rows", f"source {source.id}: found {found}")
            elif source.prefixes:
                method.require("prefix", f"source {source.id}: found row_prefixes")
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
        """Yields records of checked sources in input order, with `window` batches of sources read ahead.

        Adds to `report`, and calls `tick` with the number of examples, after each batch; `drafter`: not the config's.
        """
        method, chosen = self.method(strategy), self.make_strategy(strategy, drafter)
        wanted = batch_size
        batch_size = self.batch_size_for(wanted)
        window *= -(-wanted // batch_size)  # as far ahead as batches of the wanted size would read
        waiting, across = iter(given), 0
        while chunk := list(islice(waiting, batch_size * window)):
            across = across or min(len(self._devices), -(-len(chunk) // batch_size))
            encoded = [self.ids_of(source, report) for source in chunk]
            order = sorted(range(len(chunk)), key=lambda i: len(encoded[i]))
            records: dict[int, Record] = {}
            for first in range(0, len(order), across * batch_size):
                part = order[first : first + across * batch_size]
                ids = [encoded[i] for i in part]
                wished = self._wishes([chunk[i] for i in part], ids, method, chosen)
                found = self.programs.decode(
                    ids,
                    chosen,
                    batch_size=batch_size,
                    across=across,
                    report=report,
                    wishes=wished,
                    adapter=self.adapter,
                )
                begun = time.perf_counter()
                for b, i in enumerate(part):
                    records[i] = self._record(chunk[i], method, chosen, found, b)
                report.seconds += time.perf_counter() - begun
                for i in part:
                    count(records[i], method, report, config=self.config, tokenizer=self.tokenizer)
                tick(len(part))
            yield from (records[i] for i in range(len(chunk)))

    def _record(self, source: Source, method: Method, made: Strategy, found: Decoded, place: int) -> Record:
        config, tokenizer = self.config, self.tokenizer
        return record_of(source, method, found, place, start=made.start, config=config, tokenizer=tokenizer)

    def _wishes(self, batch: Sequence[Source], ids: list[Sequence[int]], method: Method, made: Strategy) -> Wishes:
        return wishes.of_batch(batch, ids, method, made, config=self.config, tokenizer=self.tokenizer)

    def batch_size_for(self, wanted: int) -> int:
        """The number of sources that a device decodes at a time when so many are wanted: on a CPU a few at most."""
        on_cpu = self._devices[0].platform == "cpu"
        return min(wanted, programs.CPU_BATCH) if on_cpu else wanted

    def make_strategy(
        self, name: str | None = None, drafter: Drafter | None = None, *, drafts: bool = True
    ) -> Strategy:
        """The checked strategy that decodes by the method of that name (None: `default_strategy`).

        `drafter`: instead of the config's; `drafts`: whether drafts are verified if the config says so.
        """
        method = self.method(name)
        lines = methods.doubts(method.name, self.config, self.trained) if self.trained else []
        lines += methods.unread(method, self.config, self._asked)
        if self.schema is not None:
            schema_lib.check(method, self.config)
            if drafts and (drafter or self.config.decode.draft != "none"):
                lines = [*lines, "a schema is given, so no drafts are verified, and records have no trace"]
            drafts, drafter = False, None
        made = methods.make_strategy(method, self.config.decode, self.ids, drafter, drafts=drafts)
        if lost := [end for end in self.ids.other_ends if end not in ends_of(made)]:
            names = " and ".join(map(str, lost))
            lines.append(f"{method.label}: end token {names} of the model ends no row, as it is not in `other_ends`")
        for line in lines:
            if line not in self._told:
                self._told.add(line)
                logger.warning(line)
        small.check(self._opened.small, made, method)
        return made

    def ids_of(self, source: Source, report: Report | None = None) -> Sequence[int]:
        """Its token ids, as many as the encoder takes; the report counts those that were cut."""
        try:
            found = encode_source(source.content, self.config.data, self.tokenizer, self.architecture)
        except UserError as error:
            raise UserError(f"source {source.id}: {error}") from error
        if report:
            report.cut_sources += found.left_out > 0
        return found.ids


def _kind(given: Any) -> str:
    return "a text" if isinstance(given, str | bytes) else f"one record ({type(given).__name__})"
