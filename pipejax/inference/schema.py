"""A JSON schema that answers follow: its rows, the table by which tokens are chosen, and the object that rows make."""

import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipejax.config import Config
from pipejax.data import json_schema
from pipejax.data.expressions import Expressions, TooLarge
from pipejax.data.token_bytes import token_bytes
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Grammar, Strategy, Table
from pipejax.decoding.grammar import FAR
from pipejax.methods import Given, Method, prefix_ids
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)

KEPT = 16  # schemas that stay compiled
STATES = 1 << 15  # of the automaton of a schema, at the most
ENTRIES = 1 << 24  # of its table, 64 MiB
MARKS = " :=-"  # that may follow a property's name in `grid.row_names`


@dataclasses.dataclass(frozen=True)
class Row:
    """A property."""

    name: str
    beginning: tuple[int, ...]  # its first tokens
    start: int  # state of the table, after them
    value: Callable[[str], object]  # of its text


@dataclasses.dataclass(frozen=True, eq=False)
class Schema:
    """A schema for one tokenizer, and for rows that are named in one way."""

    text: str  # its JSON
    names: tuple[str, ...]  # of the properties, in its order
    rows: tuple[Row, ...]  # in the order of the grid
    table: Table
    spelled: Sequence[bytes]  # by each token

    @property
    def given(self) -> Given:
        """The known part of the rows of an answer."""
        return Given(tuple(row.beginning for row in self.rows), len(self.rows), "schema")

    def grammar(self, strategy: Strategy, bounds: Sequence[int | None]) -> Grammar:
        """The grammar of a batch.

        Args:
          bounds: tokens of a row at the most, for each example; None: as many as the grid holds.
        """
        rows, times = strategy.places
        starts, first, last = (np.zeros((len(bounds), rows), np.int32) for _ in range(3))
        for i, row in enumerate(self.rows):
            begins = int(strategy.start(i))
            starts[:, i], first[:, i] = row.start, begins + len(row.beginning)
            last[:, i] = [min(times - 1, times if most is None else begins + most) for most in bounds]
            nearest = int(np.asarray(self.table.distance)[row.start])
            if (short := nearest - (last[:, i] - first[:, i])).max() > 0:
                b = int(short.argmax())
                bound = f"grid.time_max={times}" if bounds[b] is None else f"{bounds[b]} tokens a row"
                needed = int(first[b, i]) + nearest + 1 if bounds[b] is None else len(row.beginning) + nearest
                where = f"schema: properties.{row.name}"
                if nearest >= FAR:
                    raise UserError(f"{where}: found no text that this tokenizer can write; expected some")
                raise UserError(f"{where}: found {bound}; expected at least {needed}, so that the row can end")
        return Grammar(self.table, starts, first, last, strategy.eos)

    def dump_row(self, number: int, tokens: Sequence[int]) -> str:
        """The JSON of a property, its name included, from all tokens of its row."""
        row = self.rows[number]
        value = row.value(b"".join(self.spelled[token] for token in tokens[len(row.beginning) :]).decode())
        return f"{json.dumps(row.name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"

    def dump(self, rows: Sequence[Sequence[int]]) -> str:
        """The JSON of an answer, from the tokens of each row of the grid."""
        pairs = {row.name: self.dump_row(i, rows[i]) for i, row in enumerate(self.rows)}
        return f"{{{', '.join(pairs[name] for name in self.names)}}}"


class Schemas:
    """The schemas that were asked for last, compiled; threads may share it."""

    def __init__(self) -> None:
        """None yet."""
        self._found: dict[tuple[object, ...], Schema] = {}
        self._lock = threading.Lock()

    def find(
        self,
        given: Mapping[str, object] | str | Path,
        method: Method,
        strategy: Strategy,
        config: Config,
        tokenizer: Tokenizer | None,
    ) -> Schema:
        """The compiled schema, if answers of the method can follow it."""
        check(method, config)
        found, names = read(given), config.grid.row_names
        key = json.dumps(found), names, strategy
        with self._lock:
            if key in self._found:
                self._found[key] = self._found.pop(key)  # the last to go
            else:
                assert config.model is not None
                size, (_, times) = config.model.vocab_size, strategy.places
                made = make(found, tokenizer, row_names=names, eos=strategy.eos, size=size, times=times)
                method.given(made.given)
                made.grammar(strategy, [None])
                while len(self._found) >= KEPT:
                    del self._found[next(iter(self._found))]
                self._found[key] = made
            return self._found[key]


def check(method: Method, config: Config) -> None:
    """Raises a UserError if answers of the method cannot follow any schema with these settings."""
    method.require("rows", "schema: found one", "strategy pipelined")
    if config.decode.limit != "none":
        raise UserError(f"decode.limit: found {config.decode.limit} with a schema; expected none")
    if config.grid.stop == "literal" and config.grid.delay:
        raise UserError("grid.stop: found literal with a schema; expected empty_row, as each property has a row")


def read(given: Mapping[str, object] | str | Path) -> object:
    """The JSON of a schema: an object, or the file that holds it."""
    where = given if isinstance(given, str | Path) else "schema"
    try:
        found = json.loads(Path(given).read_text(encoding="utf-8-sig")) if isinstance(given, str | Path) else given
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        text.encode()  # fails for half a surrogate pair
        return json.loads(text)
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror}); expected a JSON schema") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: found no JSON ({error}); expected a JSON schema") from error


def make(
    schema: object, tokenizer: Tokenizer | None, *, row_names: Sequence[str], eos: int, size: int, times: int
) -> Schema:
    """Compiles a schema.

    Args:
      schema: its JSON.
      tokenizer: of the model.
      row_names: with which rows begin in the model's training; a property has the one that is its name.
      eos: the id that ends a row.
      size: of the model's vocabulary.
      times: tokens of a row, at the most.

    Raises:
      UserError: rows cannot follow it, or this tokenizer cannot write them.
    """
    if tokenizer is None:
        raise UserError("schema: found one, but the checkpoint has no tokenizer; expected none")
    made, spelled = Expressions(), _spelled(tokenizer, size)
    try:
        found = json_schema.read_properties(schema, made, "schema", longest=times * max(map(len, spelled)))
    except RecursionError as error:
        raise UserError("schema: found groups or lists in too many others; expected fewer") from error
    named = {name.rstrip(MARKS): (i, name) for i, name in enumerate(row_names)}
    if strange := [name for name in found if name not in named] if named else []:
        logger.warning(
            f"schema: properties.{strange[0]}: found no such name in grid.row_names = {list(row_names)}; the model has "
            "not learned to write that row"
        )
    known = sorted(found, key=lambda name: named[name][0] if not strange and named else 0)
    texts = [named[name][1] if name in named else f"{name}:" for name in known]
    begun = [prefix_ids(tokenizer, text, "schema: properties", eos) for text in texts]
    if twice := next((ids for ids in begun if begun.count(ids) > 1), ()):
        same = [name for name, ids in zip(known, begun, strict=True) if ids == twice]
        raise UserError(
            f"schema: properties: found rows of {' and '.join(same)} that begin with the same tokens; expected names "
            "that this tokenizer tells apart"
        )
    _warn_of_unspelled(found, spelled)
    try:
        automaton = made.compile([found[name].expression for name in known], STATES)
        parts = [[int(automaton.kinds[byte]) for byte in token] for token in spelled]
        table = Table.lift(automaton.moves, automaton.accepts, parts, most=ENTRIES)
    except (TooLarge, RecursionError):
        table = None
    if table is None:
        raise UserError(
            f"schema: found one of more than {STATES} states, or of a table of more than {ENTRIES} entries; expected "
            "shorter bounds and patterns"
        )
    rows = (Row(*row, found[row[0]].read) for row in zip(known, begun, automaton.starts, strict=True))
    return Schema(json.dumps(schema), tuple(found), tuple(rows), table, spelled)


@functools.lru_cache(maxsize=2)
def _spelled(tokenizer: Tokenizer, size: int) -> list[bytes]:
    return token_bytes(tokenizer, size)


def _warn_of_unspelled(found: Mapping[str, json_schema.Texts], spelled: Sequence[bytes]) -> None:
    """Says which values that the schema spells out the tokenizer cannot write."""
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
            logger.warning(f"schema: properties.{name}: found {lost[0]!r}{more}, which this tokenizer cannot write")
