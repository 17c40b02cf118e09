"""A JSON schema that answers follow: its rows, the table by which tokens are chosen, and the object that rows make."""

import dataclasses
import functools
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from pipejax.apps.schemas import json_schema
from pipejax.apps.schemas.expressions import MOST, Expressions, TooLarge
from pipejax.apps.schemas.grammar import FAR, Grammar, Table, TableTooLarge
from pipejax.apps.schemas.token_bytes import token_bytes
from pipejax.config import Config
from pipejax.config.row_names import columns_of
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Strategy, ends_of
from pipejax.inference.answer_format import AnswerFormat, AnswerFormats, Effort, FormatRow, Uncompiled
from pipejax.methods import Method, prefix_ids
from pipejax.system import strict_json
from pipejax.system.errors import UserError
from pipejax.system.fields import named, shown_value

logger = logging.getLogger(__name__)

KEPT = 16  # number of compiled schemas that are kept
KEPT_REFUSALS = 256
STATES = 1 << 15  # the most states of a schema's automaton
ENTRIES = 1 << 24  # the most entries of its table, 64 MiB

Key = tuple[object, ...]  # the values that a compiled schema depends on
Value = TypeVar("Value")


class Work(NamedTuple):
    """Limits on the work of compiling a schema."""

    steps: int  # steps for its automaton
    entries: int  # entries of its table


WORK = {
    Effort.WHOLE: Work(MOST, ENTRIES),  # each limit takes about a quarter of a second
    Effort.QUICK: Work(1 << 14, 1 << 20),  # a sixteenth, which suffices for common schemas
}


@dataclasses.dataclass(frozen=True, eq=False)
class Schema(AnswerFormat):
    """A compiled JSON schema: each property is a row, and the text of an answer is a JSON object."""

    label = "a schema"

    starts: tuple[int, ...]  # the state of the table after the beginning of each row
    table: Table
    spelled: Sequence[bytes]  # the bytes of each token

    @property
    def program_label(self) -> str:
        """See `AnswerFormat`. Gives the size of the table."""
        kinds, states = self.table.moves.shape
        return f"a schema of a new shape ({kinds} kinds of tokens, {states} states)"

    def check(self, method: Method, config: Config) -> None:
        """See `AnswerFormat`."""
        check(method, config, self.where)

    def rule(self, strategy: Strategy, bounds: Sequence[int | None]) -> Grammar:
        """See `AnswerFormat`. Returns the rule that each row is a text of the automaton."""
        rows, times = strategy.places
        starts, first, last = (np.zeros((len(bounds), rows), np.int32) for _ in range(3))
        for i, row in enumerate(self.rows):
            begins = int(strategy.start(i))
            starts[:, i], first[:, i] = self.starts[i], begins + len(row.beginning)
            last[:, i] = [min(times - 1, times if most is None else begins + most) for most in bounds]
            nearest = int(np.asarray(self.table.distance)[self.starts[i]])
            if (short := nearest - (last[:, i] - first[:, i])).max() > 0:
                b = int(short.argmax())
                bound = f"grid.time_max={times}" if bounds[b] is None else f"{bounds[b]} tokens a row"
                needed = int(first[b, i]) + nearest + 1 if bounds[b] is None else len(row.beginning) + nearest
                where = f"{self.where}: properties.{named(row.name)}"
                if nearest >= FAR:
                    raise UserError(where, found="no text that this tokenizer can encode", expected="at least one")
                raise UserError(where, found=f"{bound}", expected=f"at least {needed}, so that the row can end")
        return Grammar(self.table, starts, first, last, ends_of(strategy))

    def part(self, place: int, tokens: Sequence[int]) -> str:
        """See `AnswerFormat`. Returns a property as JSON, with the brace or the comma before it."""
        row = self.rows[self.order[place]]
        value = row.value(b"".join(self.spelled[token] for token in tokens[len(row.beginning) :]).decode())
        pair = f"{json.dumps(row.name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        return f"{', ' if place else '{'}{pair}{'}' if place == len(self.names) - 1 else ''}"


class Schemas(AnswerFormats):
    """A cache of the most recently used schemas, compiled or refused. Threads may share it."""

    def __init__(self) -> None:
        """Creates an empty cache."""
        self._found: dict[Key, Schema] = {}
        self._refused: dict[Key, dict[str, str]] = {}
        self._lock, self._compiling = threading.Lock(), {effort: threading.Lock() for effort in Effort}

    def find(
        self,
        given: Mapping[str, object] | str | Path,
        method: Method,
        strategy: Strategy,
        config: Config,
        tokenizer: Tokenizer | None,
        *,
        effort: Effort | None = Effort.WHOLE,
        pause: Callable[[], None] | None = None,
    ) -> Schema:
        """See `AnswerFormats`. A schema that was refused before is refused for every `effort`."""
        where = str(given) if isinstance(given, str | Path) else "schema"
        check(method, config, where)
        found, names = read(given, where), columns_of(config.data.columns, config.grid.row_names)
        key = hashlib.sha256(json.dumps(found).encode()).digest(), (*names.items(),), strategy, where
        if there := self._look_up(key):
            return there
        if effort is None:
            raise Uncompiled
        with self._compiling[effort]:  # one compilation at a time
            if there := self._look_up(key):  # another thread has compiled it meanwhile
                return there
            assert config.model is not None
            try:
                size = config.model.vocab_size
                made = make(
                    found, where, tokenizer, row_names=names, size=size, strategy=strategy, effort=effort, pause=pause
                )
                method.add_prefixes(made.prefixes)
                made.rule(strategy, [None])
            except UserError as error:
                self._store(self._refused, key, error.fields(), KEPT_REFUSALS)
                raise
            self._store(self._found, key, made, KEPT)
            return made

    def usual(self, size: int) -> Schema:
        """See `AnswerFormats`."""
        return Schema("schema", "{}", ("",), (FormatRow("", (0,), str),), (1,), Table.least(size), ())

    def _look_up(self, key: Key) -> Schema | None:
        """Returns the schema if it is in the cache.

        Raises:
          UserError: the schema was refused before.
        """
        if fields := self._refused.get(key):
            raise UserError(**fields)
        with self._lock:
            if key in self._found:
                self._found[key] = self._found.pop(key)  # most recently used, so removed last
            return self._found.get(key)

    def _store(self, kept: dict[Key, Value], key: Key, value: Value, most: int) -> None:
        with self._lock:
            kept[key] = value
            if len(kept) > most:
                del kept[next(iter(kept))]


def check(method: Method, config: Config, where: str = "schema") -> None:
    """Raises a UserError if answers of the method cannot follow any schema with these settings."""
    method.require("rows", where, "a schema", "method pipelined")
    if config.decode.limit != "none":
        raise UserError("decode.limit", found=f"{config.decode.limit} with a schema", expected="none")
    if config.grid.stop == "literal" and config.grid.delay:
        raise UserError("grid.stop", found="literal with a schema", expected="empty_row, as each property has a row")


def read(given: Mapping[str, object] | str | Path, where: str) -> object:
    """Returns the JSON of a schema: the given object, or the content of the file at the given path."""
    try:
        found = (
            strict_json.loads(Path(given).read_text(encoding="utf-8-sig")) if isinstance(given, str | Path) else given
        )
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        text.encode()  # fails for half of a surrogate pair
        return strict_json.loads(text)
    except strict_json.DuplicateKey as error:
        raise UserError(where, found=error.found, expected=error.expected) from error
    except OSError as error:
        raise UserError(where, f"cannot be read ({error.strerror})", expected="a JSON schema") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(where, found=f"no JSON ({error})", expected="a JSON schema") from error


def make(
    schema: object,
    where: str,
    tokenizer: Tokenizer | None,
    *,
    row_names: Mapping[str, str],
    size: int,
    strategy: Strategy,
    effort: Effort = Effort.WHOLE,
    pause: Callable[[], None] | None = None,
) -> Schema:
    """Compiles a schema.

    Args:
      schema: the schema's JSON.
      where: its name in messages.
      tokenizer: the model's tokenizer.
      row_names: the beginnings of rows in training, by property and in order.
      size: the vocabulary size, V.
      strategy: the strategy of the answers.
      effort: see `AnswerFormats.find`.
      pause: see `AnswerFormats.find`.

    Raises:
      UserError: rows cannot follow the schema, or the tokenizer cannot write them.
      Uncompiled: the effort is not sufficient.
    """
    if tokenizer is None:
        raise UserError(
            where, "the checkpoint has no tokenizer", expected="a checkpoint with a tokenizer, which encodes the rows"
        )
    work = WORK[effort]
    made, spelled, (rows, times) = Expressions(work.steps, pause), _spelled(tokenizer, size), strategy.places
    longest = times * max(map(len, spelled))
    try:
        found = json_schema.read_properties(schema, made, where, longest=longest, most=rows)
    except TooLarge as error:
        raise _too_large(where, error, effort) from error
    except RecursionError as error:
        raise UserError(where, found="lists or objects nested too deeply", expected="fewer levels") from error
    learned = {key: (i, name) for i, (key, name) in enumerate(row_names.items())}
    strange = [name for name in found if name not in learned] if learned else []
    known = sorted(found, key=lambda name: learned[name][0] if not strange and learned else 0)
    texts = [learned[name][1] if name in learned else f"{name}:" for name in known]
    begun = [prefix_ids(tokenizer, text, f"{where}: properties", ends_of(strategy)) for text in texts]
    if twice := next((ids for ids in begun if begun.count(ids) > 1), ()):
        same = [named(name) for name, ids in zip(known, begun, strict=True) if ids == twice]
        raise UserError(
            f"{where}: properties",
            found=f"rows of {' and '.join(same)} that begin with the same tokens",
            expected="names with different tokens",
        )
    try:
        automaton = made.compile([found[name].expression for name in known], STATES)
        table = Table.lift(automaton[1:], spelled, most=min(work.entries, ENTRIES), pause=pause)
    except (TooLarge, TableTooLarge) as error:
        raise _too_large(where, error, effort) from error
    except RecursionError as error:
        raise UserError(where, found="groups nested too deeply", expected="fewer levels") from error
    if strange:
        logger.warning(
            f"{where}: properties.{named(strange[0])}: found a name that is not in grid.row_names "
            f"= {list(row_names.values())}; the model was not trained to write this row"
        )
    _warn_of_unspelled(found, spelled, where)
    rows_of_grid = tuple(FormatRow(name, ids, found[name].read) for name, ids in zip(known, begun, strict=True))
    return Schema(where, json.dumps(schema), tuple(found), rows_of_grid, tuple(automaton.starts), table, spelled)


def _too_large(where: str, error: Exception, effort: Effort) -> Exception:
    """Returns the exception for a schema that needs more work than `effort` allows.

    The exception is Uncompiled if a higher effort may suffice, else a UserError.
    """
    if effort != Effort.WHOLE:
        return Uncompiled()
    place = f": {error.place}" if isinstance(error, TooLarge) and error.place else ""
    return UserError(f"{where}{place}", found=f"a schema of {error}", expected="shorter bounds and patterns")


@functools.lru_cache(maxsize=2)
def _spelled(tokenizer: Tokenizer, size: int) -> list[bytes]:
    return token_bytes(tokenizer, size)


def _warn_of_unspelled(found: Mapping[str, json_schema.Texts], spelled: Sequence[bytes], where: str) -> None:
    """Warns about values listed in the schema that the tokenizer cannot write."""
    pieces = {*spelled} - {b""}
    longest = max(map(len, pieces))

    def can_spell(text: bytes) -> bool:
        reached = {0}
        for end in range(1, len(text) + 1):
            if any(start in reached and text[start:end] in pieces for start in range(max(end - longest, 0), end)):
                reached.add(end)
        return len(text) in reached

    for name, texts in found.items():
        lost = [text for text in texts.literals if not any(can_spell(f"{space}{text}".encode()) for space in ("", " "))]
        if lost:
            more = f" and {len(lost) - 1} others" if lost[1:] else ""
            found_text = f"found {shown_value(lost[0])}{more}"
            logger.warning(f"{where}: properties.{named(name)}: {found_text}, which this tokenizer cannot encode")
