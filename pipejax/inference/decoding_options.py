"""Makes the `DecodingOptions` of a batch, which determine how tokens are chosen, from the config and the sources."""

import functools
import hashlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from pipejax import config as config_lib
from pipejax.config import Config, DecodeConfig
from pipejax.data.tokenizer import Tokenizer, source_affixes
from pipejax.decoding import (
    Allowed,
    DecodingOptions,
    Repetition,
    Rule,
    Sampling,
    Strategy,
    count_forced,
    create_rule,
    ends_of,
)
from pipejax.inference.answer_format import AnswerFormat
from pipejax.inference.sources import Source
from pipejax.methods import Method, RowPrefixes, prefix_ids
from pipejax.system.errors import UserError


def row_prefixes(source: Source, method: Method) -> RowPrefixes:
    """Returns the number and the prefixes of an answer's rows, as given by the source, its format or the method."""
    if (answer_format := source.answer_format) is not None:
        if source.prefixes or source.max_rows is not None:
            expected = f"neither, as {answer_format.label} names the rows"
            raise UserError(f"source {source.id}", found="row_prefixes or max_rows", expected=expected)
        return method.add_prefixes(answer_format.prefixes)
    return method.add_prefixes(RowPrefixes(source.prefixes, source.max_rows, f"source {source.id}"))


def row_prefix_ids(source: Source, method: Method, tokenizer: Tokenizer | None, ends: Collection[int]) -> RowPrefixes:
    """Returns the number and the prefixes of an answer's rows, with prefixes as token ids.

    Args:
      source: the source.
      method: its method.
      tokenizer: the tokenizer, for prefixes that are texts.
      ends: the end tokens, which a prefix must not contain.

    Raises:
      UserError: the method or the tokenizer does not support the prefixes.
    """
    known = row_prefixes(source, method)

    def ids(prefix: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prefix, str):
            return prefix
        if tokenizer is None:  # prefixes of the method, because prefixes of sources were checked before
            raise UserError(known.where, found="texts, but the checkpoint has no tokenizer", expected="none")
        return prefix_ids(tokenizer, prefix, known.where, ends)

    return known._replace(prefixes=tuple(map(ids, known.prefixes)))


def forced_of(given: RowPrefixes, strategy: Strategy) -> np.ndarray | None:
    """Returns the forced token at each row and time, i32 [R, W], -1 where the model chooses.

    None: nothing is forced.
    """
    if not given.prefixes and given.most is None:
        return None
    forced = np.full(strategy.places, -1, np.int32)
    number = len(forced)
    for row, prefix in enumerate(given.prefixes[:number]):
        here = forced[row, strategy.start(row) :]
        here[: len(prefix)] = prefix[: len(here)]
    for row in range(number if given.most is None else given.most, number):  # an empty row ends the answer
        forced[row, strategy.start(row)] = strategy.eos
    return forced


class RuleSettings(NamedTuple):
    """The settings of rules that a request to a server cannot change."""

    kinds: tuple[type[Rule], ...] = ()  # the classes that `decode.rules` names
    separators: tuple[int, ...] = ()  # the tokens that may always be repeated
    by_row: bool = False  # whether only tokens of the same row are repetitions

    def create(self, strategy: Strategy, tokenizer: Tokenizer | None) -> tuple[Rule, ...]:
        """Returns the rules of `decode.rules` for a strategy."""
        return tuple(_created(cast(Any, kind), cast(Any, strategy), tokenizer) for kind in self.kinds)


class Constraints(NamedTuple):
    """The part of the options that all answers of a running batch share."""

    forced: np.ndarray | None = None  # i32 [R, W], as from `forced_of`
    answer_format: AnswerFormat | None = None
    rules: tuple[Rule, ...] = ()  # the rules of `decode.rules`, whose fields all examples share
    settings: RuleSettings = RuleSettings()


def rule_settings(config: Config, method: Method, tokenizer: Tokenizer | None) -> RuleSettings:
    """Returns the settings of rules.

    The tokens of a separator may be repeated if pipejax trained the weights. In the answers of other weights these
    tokens do not separate rows.
    """
    separated = tokenizer if config.train.method != "none" else None
    return RuleSettings(
        tuple(map(config_lib.imported_rule, config.decode.rule_names)),
        () if separated is None else tuple(method.extra_allowed_ids(separated)),
        config.decode.repetition_scope == "row",
    )


def end_repetitions(
    strategy: Strategy, config: Config, method: Method, tokenizer: Tokenizer | None
) -> tuple[Strategy, str]:
    """Makes answers end when their rows repeat (`decode.unique_rows`), for a method that divides a text into rows.

    Returns:
      The strategy, and the reason why repeated rows do not end an answer, or "".
    """
    if not (config.decode.unique_rows and method.parts_text and "unique" in method.can):
        return strategy, ""
    if config.train.method == "none":
        return strategy, "pipejax did not train these weights"
    return (strategy, "there is no tokenizer") if tokenizer is None else method.end_repetitions(strategy, tokenizer)


def constraints_of(
    source: Source, method: Method, strategy: Strategy, *, settings: RuleSettings, tokenizer: Tokenizer | None
) -> Constraints:
    """Returns the constraints of a running batch; `source` is any of its sources."""
    forced = forced_of(row_prefix_ids(source, method, tokenizer, ends_of(strategy)), strategy)
    return Constraints(forced, source.answer_format, settings.create(strategy, tokenizer), settings)


@functools.lru_cache(maxsize=16)
def _created(kind: Any, strategy: Any, tokenizer: Tokenizer | None) -> Rule:
    return create_rule(kind, strategy, tokenizer, "decode.rules")


def repetition_of(
    sampling: Sampling, forced: np.ndarray | None, strategy: Strategy, bos: int, settings: RuleSettings
) -> Repetition:
    """Returns the rule against repetition of a batch.

    Args:
      sampling: the settings of each example, NumPy arrays [B].
      forced: i32 [B, R, W], as in `DecodingOptions`. Forced tokens, except end tokens, are the beginnings of rows.
      strategy: the strategy.
      bos: the token with which every row begins.
      settings: the other settings.
    """
    given = np.zeros((len(np.atleast_1d(sampling.seed)), strategy.places[0]), np.int32)
    if forced is not None:
        given += count_forced(forced, strategy)
    changes = np.asarray(sampling.repetition_penalty), np.asarray(sampling.no_repeat_ngram_size)
    return Repetition(*changes, given, bos, settings.separators, settings.by_row)


def of_batch(
    sources: Sequence[Source],
    ids: Sequence[Sequence[int]],
    method: Method,
    strategy: Strategy,
    *,
    config: Config,
    tokenizer: Tokenizer | None,
) -> DecodingOptions:
    """Returns the options of a batch, NumPy arrays [B, ...].

    Args:
      sources: B sources, which have the same answer format, if any.
      ids: the token ids of the sources.
      method: the method.
      strategy: the strategy of the method.
      config: the config.
      tokenizer: the tokenizer, if there is one.
    """
    assert config.model is not None  # `load` checks it
    sampling, decode, answer_format = None, config.decode, sources[0].answer_format  # the same for all
    each = Sampling.together([sampling_of(source, decode) for source in sources])
    if decode.temperature > 0:
        sampling = each
    forced, settings = None, rule_settings(config, method, tokenizer)
    ends = config.model.end_token_ids
    tables = [forced_of(row_prefix_ids(source, method, tokenizer, ends), strategy) for source in sources]
    if any(table is not None for table in tables):
        free = np.full(strategy.places, -1, np.int32)
        forced = np.stack([free if table is None else table for table in tables])
    rules: list[Rule] = [] if answer_format is None else [answer_format.rule(strategy, [None] * len(sources))]
    if decode.limit == "source":
        allowed = np.zeros((len(ids), config.model.vocab_size), bool)
        affixes = source_affixes(tokenizer, config.model, config.data.special_tokens)
        for b, of_source in enumerate(ids):
            allowed[b, np.asarray(of_source)] = True
        allowed[:, [*affixes.prefix, *affixes.suffix]] = False  # special tokens do not belong to the text
        allowed[:, [*ends_of(strategy), *(method.extra_allowed_ids(tokenizer) if tokenizer else [])]] = True
        rules.append(Allowed(allowed))
    rules += settings.create(strategy, tokenizer)
    if each.limits_repetition.any():
        rules.append(repetition_of(each, forced, strategy, config.model.decoder_start_token_id, settings))
    return DecodingOptions(sampling=sampling, forced=forced, rules=tuple(rules), scores=decode.scores)


def sampling_of(source: Source, decode: DecodeConfig) -> Sampling:
    """Returns the distribution from which the tokens of a source's answer are sampled."""
    return Sampling.of(decode, seed_of(source, decode.seed))


def seed_of(source: Source, seed: int) -> int:
    """Returns a 32-bit seed for a source's answer.

    It depends on the source's id and the sample's number, not on the batch.
    """
    digest = hashlib.sha256(f"{seed}/{source.sample}/{source.id}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
