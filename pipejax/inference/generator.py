"""The Python API for decoding: from texts and records to records."""

import contextlib
import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax

from pipejax import methods, moved, registry
from pipejax.config import Config, DecodeConfig
from pipejax.data.encoding import encode_source
from pipejax.data.formats import rows_in
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Drafter, Refillable, Strategy, ends_of
from pipejax.inference import decoding_options, drafter_parameters, programs, streaming
from pipejax.inference import settings as settings_lib
from pipejax.inference import sources as sources_lib
from pipejax.inference.answer_format import AnswerFormat, AnswerFormats, Effort
from pipejax.inference.answers import Record, count, record_of
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.drafter_parameters import OpenDrafter
from pipejax.inference.lazy_programs import LazyPrograms, dtype_of
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.inference.running_batch import RunningBatch
from pipejax.inference.sources import Source
from pipejax.inference.streaming import RowEvent
from pipejax.methods import Ids, Method
from pipejax.system import Tree
from pipejax.system.errors import UserError
from pipejax.system.strict_json import JsonMapping, JsonObject

logger = logging.getLogger(__name__)

OF_RULES = ("rules", "repetition_penalty", "no_repeat_ngram_size")  # the settings of `decode` that change logits
WINDOW = 16  # number of batches that are read ahead and sorted by length


class StreamBatches(NamedTuple):
    """Running batches of one place with the same strategy and method."""

    first: RunningBatch  # the others are copies of it, with the same compiled programs
    free: list[RunningBatch]  # the batches that no stream uses


@moved.attributes(default_strategy="default_method")
class Generator:
    """A model ready to decode: parameters, tokenizer and settings.

    The public methods are `decode`, `stream_rows`, `under`, `warm_up`, `adapted` and `default_method`; the others are
    for pipejax's commands. Weights are laid out when the first source is decoded, after the input was checked. Copies
    with other settings (`under`, `adapted`) share weights and compiled programs.
    """

    def __init__(
        self,
        config: Config,
        params: Tree,
        tokenizer: Tokenizer | None,
        *,
        devices: Sequence[jax.Device] | None = None,
        backend: Backend | None = XLA,
        drafter: OpenDrafter | None = None,
    ) -> None:
        """Creates the generator; runs nothing on a device.

        Args:
          config: the config with the architecture.
          params: the parameters.
          tokenizer: the tokenizer; None: sources and answers are token ids.
          devices: the devices that decode a batch each; None: `programs.devices`.
          backend: the backend of the encoder and of the decoder's steps; None: the fastest on this machine.
          drafter: a drafter with its parameters; None: the drafter of `decode.draft` is opened.
        """
        if config.model is None:
            raise ValueError("config.model: found None; expected the architecture")
        self.config, self.architecture, self.tokenizer = config, config.model, tokenizer
        self._devices = list(devices or programs.devices())
        self._opened = LazyPrograms(config, params, self._devices, backend, drafter)
        # Batches of one place for `stream_rows`, by decoding strategy and method (which may have row names).
        self._streams: dict[tuple[Strategy, Method], StreamBatches] = {}
        self._streams_lock = threading.Lock()  # several threads may stream answers
        self.checkpoint = ""  # the directory of the weights
        self.origin: JsonObject = {}  # the step of the weights and their params_fp
        self.learned = ""  # the fingerprint of the training examples; "": unknown
        self.trained: Config | None = None  # the config of the training; None: unknown
        self._logged: set[str] = set()  # the lines logged so far, as each line is logged once
        self._asked: frozenset[str] = frozenset()  # keys of the settings passed to a call
        self.answer_format: AnswerFormat | None = None  # the format that answers follow: see `under`
        self._formats: dict[str, AnswerFormats] = {}  # formats by name in `registry.RULES`; copies share the dict
        self.adapters: dict[str, Generator] = {}  # adapters by name; weights and programs are shared
        self.adapter: int | None = None  # the number of this generator's adapter, 0 for the base; None: no adapters

    def __repr__(self) -> str:
        model, of = self.architecture, f" of {self.checkpoint} at step {self.origin['step']}" if self.checkpoint else ""
        held = self.config.decode.weights if self.config.decode.weights != "auto" else dtype_of(self.config).name
        kind = type(model).__name__.removesuffix("Config")
        return (
            f"<Generator{of}: {kind} of {self._opened.size / 1e6:.1f} M parameters, "
            f"{model.num_layers} + {model.num_decoder_layers} layers, vocabulary {model.vocab_size}; "
            f"{self.default_method}; {held} on {len(self._devices)} x {self._devices[0].device_kind}>"
        )

    @property
    def programs(self) -> Programs:
        """The weights on the devices, and the programs compiled for them; created at the first access."""
        return self._opened.programs

    @property
    def default_method(self) -> str:
        """The name of the method that the weights were trained for; "sequential" for converted weights."""
        return methods.default(self.config)

    def adapted(self, name: str) -> "Generator":
        """Returns the generator with an adapter that was passed to `load`, and with the settings of its training.

        Args:
          name: the name of the adapter.

        Raises:
          UserError: there is no adapter of this name.
        """
        if name not in self.adapters:
            raise UserError("adapter", found=f"{name!r}", expected=f"{' or '.join(self.adapters) or 'none'}")
        return self.adapters[name]

    @property
    def ids(self) -> Ids:
        """The token ids of bos and of the end tokens of rows."""
        return Ids.of(self.architecture)

    def method(self, name: str | None = None) -> Method:
        """Returns the method of a name, with the settings of the config; None: `default_method`."""
        return methods.make(name or self.default_method, self.config)

    @moved.keywords(strategy="method", given="sources")
    def decode(
        self,
        sources: Iterable[str | Sequence[int] | JsonMapping],
        *,
        method: str | None = None,
        batch_size: int | None = None,
        drafter: Drafter | None = None,
        schema: Mapping[str, object] | str | Path | None = None,
        **settings: Any,
    ) -> list[Record]:
        """Decodes sources: texts, lists of token ids, or records such as `pipejax decode` reads.

        A returned record is `{"id", "text", "rows", "row_ids", "steps", "calls", "truncated", "method"}`, and more on
        request; docs/decoding.md describes each field. The id of a source without an id is its position.

        Args:
          sources: a list, a data frame or another table whose rows are records. Token ids include special
            tokens such as the eos.
          method: the name of a method, such as "sequential"; None: `default_method`.
          batch_size: the batch size on each device; None: `decode.batch_size`.
          drafter: a custom drafter that replaces `decode.draft` (docs/drafting.md). If the drafter wants
            parameters, it must be of the class that `decode.draft` named when the checkpoint was opened.
          schema: a flat JSON schema, or the path of its file: the text of each record is then a valid JSON object
            (docs/schemas.md).
          settings: values for keys of the sections decode and grid, such as temperature=0.7, for this call only. A
            program is compiled only if there is none for this method and these sizes.

        Raises:
          UserError: an unknown method or setting, a value out of its range, an empty source, an id outside the
            vocabulary, text without a tokenizer, or a schema that rows cannot follow.
        """
        if isinstance(sources, str | bytes | Mapping):
            raise UserError(
                "sources", found=f"{_kind(sources)}", expected="a list of texts, of token ids or of records"
            )
        own = self._with("decode", settings if batch_size is None else {**settings, "batch_size": batch_size})
        own = own if schema is None else own.under(schema, method)
        given = list(rows_in(sources, "sources"))
        sources_lib.check_fields(sources_lib.fields_of(self.config), given, "sources")
        read = (own.source(value, f"source {i}", i) for i, value in enumerate(given))
        checked = list(own.samples_of(read, method))
        size = min(own.config.decode.batch_size, 1 << max(len(checked) - 1, 0).bit_length())
        report = Report(other_steps=None)  # not returned, so skip counting other steps, which tokenises again
        return list(own.stream(checked, method=method, batch_size=size, report=report, drafter=drafter))

    @moved.keywords(strategy="method", given="source")
    def stream_rows(
        self, source: str | Sequence[int] | JsonMapping, *, method: str | None = None, **settings: Any
    ) -> Iterator[RowEvent | Record]:
        """Yields each token of one source's answer as it is generated, and finally the record.

        An event is `(row, token, text, done)`. `text` is the text of the row so far. `done` means that the row has
        ended, and that `token` is its end token. Empty rows have no events.

        Args:
          source: a text, token ids or a record.
          method: the name of a method, such as "sequential"; None: `default_method`.
          settings: as for `decode`.

        Raises:
          UserError: as for `decode`; also for beams, `decode.limit` and row prefixes, which streams do not support.
        """
        own = self._with("stream_rows", settings, batch_size="none: one source", samples="none: one answer")
        return own.stream_source(own.source(source, "the source", 0), method or self.default_method)

    def stream_source(self, source: Source, name: str) -> Iterator[RowEvent | Record]:
        """Like `stream_rows`, for a checked source. Unsupported settings raise a UserError before iteration.

        `name` is the name of the method.
        """
        config, method = self.config.decode, self.method(name)
        method.require("stream")
        if config.limit != "none":
            raise UserError("decode.limit", found=f"{config.limit}, which a stream of rows does not support")
        if source.prefixes or source.max_rows is not None:
            raise UserError(
                f"source {source.id}", found="row_prefixes or max_rows, which a stream of rows does not support"
            )
        return self._stream(source, method, cast(Refillable, self.make_strategy(name)))

    def _stream(self, source: Source, method: Method, made: Refillable) -> Iterator[RowEvent | Record]:
        """Decodes a source in a running batch with one place; reuses a free batch of the same strategy."""
        config = self.config.decode
        settings = decoding_options.rule_settings(self.config, method, self.tokenizer)
        constraints = decoding_options.constraints_of(source, method, made, settings=settings, tokenizer=self.tokenizer)
        ids, sampling = self.ids_of(source), decoding_options.sampling_of(source, config)
        wanted = {"log_probs": config.scores, "unique": config.unique_rows}
        with self._streams_lock:
            if (made, method) not in self._streams:
                first = RunningBatch(self.programs, made, 1)
                self._streams[made, method] = StreamBatches(first, [first])
            batches = self._streams[made, method]
            batch = batches.free.pop() if batches.free else batches.first.empty_copy()
        try:
            batch.give(constraints)
            found = streaming.events(batch, ids, sampling, self.tokenizer, adapter=self.adapter, **wanted)
            with contextlib.closing(found) as events:  # an abandoned stream frees its place
                for event in events:
                    if isinstance(event, RowEvent):
                        yield event
                        continue
                    scores = event.log_probs if config.scores else None
                    whole = dataclasses.replace(event, calls=made.calls(event), log_probs=scores)
                    yield record_of(
                        source, method, whole, 0, start=made.start, config=self.config, tokenizer=self.tokenizer
                    )
        except Exception:  # after an error of the device or a lack of memory, the arrays may be invalid
            # The traceback of the error refers to the batch, so the batch's arrays are freed here.
            batch.clear()
            raise
        finally:
            batches.free.append(batch)

    @moved.keywords(strategy="method")
    def warm_up(
        self,
        lengths: Sequence[int],
        *,
        batch_sizes: Sequence[int] = (1, 2, 4, 8),
        method: str | None = None,
        **settings: Any,
    ) -> Report:
        """Compiles the programs for decoding with these settings on one device.

        Lengths are rounded up to 16, 24, 32, 48, 64, 96, ... Programs for other lengths are compiled when they are
        needed, and so are programs for sampling, scores, `decode.limit` and row prefixes, unless `settings` have them.

        Args:
          lengths: lengths of sources, in tokens.
          batch_sizes: lengths of lists of sources.
          method: the name of a method, such as "sequential"; None: `default_method`.
          settings: as for `decode`.

        Returns:
          A report with the number of programs and the seconds of compiling.
        """
        own, report = self._with("warm_up", settings, batch_size="batch_sizes, a list"), Report()
        used, chosen = own.method(method), own.make_strategy(method)
        known: JsonObject = {"config": own.config, "tokenizer": own.tokenizer}
        for size in map(own.batch_size_for, batch_sizes):
            for length in (min(length, own.config.data.max_source) for length in lengths):
                ids = [own.architecture.eos_token_id] * length
                wished = decoding_options.of_batch(
                    [Source("", ids, answer_format=own.answer_format)] * size, [ids] * size, used, chosen, **known
                )
                own.programs.warm_up(
                    chosen, batch_size=size, length=length, report=report, options=wished, adapter=own.adapter
                )
        return report

    def _with(self, call: str, settings: JsonMapping, **without: str) -> "Generator":
        """Returns a copy with other settings, for a call of the method named `call`; see `settings.of_call`."""
        if not settings:
            return self
        other, opened = copy.copy(self), self._opened.drafter
        drafter = opened.drafter if opened else None
        other.config = settings_lib.of_call(self.config, call, settings, drafter=drafter, without=without)
        other._asked = self._asked | {settings_lib.NAMES[name] for name in settings}
        return other

    @moved.keywords(strategy="method", given="schema")
    def under(
        self,
        schema: Mapping[str, object] | str | Path,
        method: str | None = None,
        *,
        effort: Effort | None = Effort.WHOLE,
        pause: Callable[[], None] | None = None,
    ) -> "Generator":
        """Returns a generator whose answers follow a JSON schema; it shares weights and programs with this one.

        Args:
          schema: a flat JSON schema, or the path of its file.
          method: the name of the method that will be used; None: `default_method`.
          effort: as for `AnswerFormats.find`.
          pause: as for `AnswerFormats.find`.

        Raises:
          UserError: the schema is not valid or not supported.
        """
        made = self.make_strategy(method, drafts=False)
        other, used = copy.copy(self), self.method(method)
        known = self.config, self.tokenizer
        other.answer_format = self.formats("schema").find(schema, used, made, *known, effort=effort, pause=pause)
        return other

    def formats(self, name: str) -> AnswerFormats:
        """Returns the `AnswerFormats` of a name in `registry.RULES`, made once; it caches compiled formats."""
        if name not in self._formats:
            self._formats.setdefault(name, registry.find(registry.RULES[name])())
        return self._formats[name]

    def source(self, value: Any, place: str, name: str | int) -> Source:
        """Makes a checked source of a text, token ids or a record.

        Args:
          value: the text, the ids or the record.
          place: the place of the value for messages.
          name: the id of a source that has none.

        Raises:
          UserError: the value cannot be decoded.
        """
        source = Source(name, value)
        if isinstance(value, Mapping):
            source = sources_lib.of_record(value, place, name, self.config)
            place += ': "source_ids"' if "source_ids" in value else ""
        checked = sources_lib.check(source, place, architecture=self.architecture, tokenizer=self.tokenizer)
        return checked._replace(answer_format=self.answer_format)

    def samples_of(self, sources: Iterable[Source], name: str | None) -> Iterator[Source]:
        """Yields each source `decode.samples` times; raises a UserError if the method does not support its fields.

        `name` is the name of the method; None: `default_method`.
        """
        method = self.method(name)
        for source in sources:
            decoding_options.row_prefix_ids(source, method, self.tokenizer, self.ids.ends)
            if len(source.prefixes) > 1 or source.max_rows is not None:
                found = "max_rows" if source.max_rows is not None else "several row_prefixes"
                method.require("rows", f"source {source.id}", found)
            elif source.prefixes:
                method.require("prefix", f"source {source.id}", "row_prefixes")
            yield from (source._replace(sample=k) for k in range(self.config.decode.samples))

    def stream(
        self,
        sources: Iterable[Source],
        *,
        method: str | None,
        batch_size: int,
        report: Report,
        window: int = WINDOW,
        tick: Callable[[int], None] = lambda count: None,
        drafter: Drafter | None = None,
    ) -> Iterator[Record]:
        """Yields the records of checked sources in input order.

        Args:
          sources: the sources.
          method: the name of the method; None: `default_method`.
          batch_size: the batch size on each device.
          report: the report, which is updated after each batch.
          window: the number of batches to read ahead and sort by length.
          tick: a function that is called with the number of examples after each batch.
          drafter: the drafter that replaces the drafter of the config.
        """
        used, chosen = self.method(method), self.make_strategy(method, drafter)
        known: JsonObject = {"config": self.config, "tokenizer": self.tokenizer}
        wanted = batch_size
        batch_size = self.batch_size_for(wanted)
        window *= -(-wanted // batch_size)  # read as many sources ahead as with the wanted batch size
        waiting, across = iter(sources), 0
        while chunk := list(islice(waiting, batch_size * window)):
            across = across or min(len(self._devices), -(-len(chunk) // batch_size))
            encoded = [self.ids_of(source, report) for source in chunk]
            order = sorted(range(len(chunk)), key=lambda i: len(encoded[i]))
            records: dict[int, Record] = {}
            for first in range(0, len(order), across * batch_size):
                part = order[first : first + across * batch_size]
                ids = [encoded[i] for i in part]
                wished = decoding_options.of_batch([chunk[i] for i in part], ids, used, chosen, **known)
                found = self.programs.decode(
                    ids,
                    chosen,
                    batch_size=batch_size,
                    across=across,
                    report=report,
                    options=wished,
                    adapter=self.adapter,
                )
                begun = time.perf_counter()
                for b, i in enumerate(part):
                    records[i] = record_of(chunk[i], used, found, b, start=chosen.start, **known)
                report.seconds += time.perf_counter() - begun
                for i in part:
                    count(records[i], used, report, config=self.config, tokenizer=self.tokenizer)
                tick(len(part))
            yield from (records[i] for i in range(len(chunk)))

    def batch_size_for(self, wanted: int) -> int:
        """Returns the batch size on a device if `wanted` is requested: on a CPU at most `programs.CPU_BATCH`."""
        on_cpu = self._devices[0].platform == "cpu"
        return min(wanted, programs.CPU_BATCH) if on_cpu else wanted

    def make_strategy(
        self, name: str | None = None, drafter: Drafter | None = None, *, drafts: bool = True
    ) -> Strategy:
        """Returns the checked decoding strategy of a method.

        Args:
          name: the name of the method; None: `default_method`.
          drafter: the drafter that replaces the drafter of the config.
          drafts: whether the drafts of the config are used.
        """
        method = self.method(name)
        decode = self.config.decode
        lines = methods.training_mismatches(method.name, self.config, self.trained) if self.trained else []
        lines += methods.ignored_settings(method, self.config, self._asked)
        if self.answer_format is not None:
            self.answer_format.check(method, self.config)
            if drafts and (drafter or decode.draft != "none"):
                given = f"{self.answer_format.label} is given"
                lines = [*lines, f"{given}, so no drafts are verified, and records have no trace"]
            drafts, drafter = False, None
        made = methods.make_strategy(method, decode, self.ids, drafter, drafts=drafts)
        decoding_options.rule_settings(self.config, method, self.tokenizer).create(made, self.tokenizer)
        changes = [f"decode.{key}" for key in OF_RULES if getattr(decode, key) != getattr(DecodeConfig, key)]
        if changes and decode.temperature == 0 and not decode.scores:
            named = ", ".join(changes)
            lines.append(
                f"{named}: each step returns all logits; kernels that return only the best tokens are not used"
            )
        if decode.unique_rows and "unique" not in method.can:
            does = methods.ABILITIES["unique"].does
            lines.append(f"decode.unique_rows: repeated rows are left out, but {method.label} does not {does}")
        if self.answer_format is None:
            made, why = decoding_options.end_repetitions(made, self.config, method, self.tokenizer)
            if why:
                lines.append(f"decode.unique_rows: repeated rows are left out, but do not end an answer: {why}")
        if lost := [end for end in self.ids.other_ends if end not in ends_of(made)]:
            names = " and ".join(map(str, lost))
            lines.append(
                f"{method.label}: end token {names} of the model ends no row, because it is not in `other_ends`"
            )
        for line in lines:
            if line not in self._logged:
                self._logged.add(line)
                logger.warning(line)
        drafter_parameters.check(self._opened.drafter, made, method)
        return made

    def ids_of(self, source: Source, report: Report | None = None) -> Sequence[int]:
        """Returns the token ids of a source, truncated to `data.max_source`; the report counts truncated sources."""
        try:
            found = encode_source(source.content, self.config.data, self.tokenizer, self.architecture)
        except UserError as error:
            raise error.within(f"source {source.id}") from error
        if report:
            report.cut_sources += found.left_out > 0
        return found.ids


def _kind(given: Any) -> str:
    return "a text" if isinstance(given, str | bytes) else f"one record ({type(given).__name__})"
