"""Makes the `DecodingOptions` of a batch, which determine how tokens are chosen, from the config and the sources."""

import hashlib
from collections.abc import Collection, Sequence

import numpy as np

from pipejax.config import Config, DecodeConfig
from pipejax.data.tokenizer import Tokenizer, source_affixes
from pipejax.decoding import DecodingOptions, Sampling, Strategy, ends_of
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
      ids: their token ids.
      method: the method.
      strategy: the strategy of the method.
      config: the config.
      tokenizer: the tokenizer, if there is one.
    """
    assert config.model is not None  # `load` checks it
    sampling, decode, answer_format = None, config.decode, sources[0].answer_format  # the same for all
    if decode.temperature > 0:
        sampling = Sampling.together([sampling_of(source, decode) for source in sources])
    forced = allowed = None
    ends = config.model.end_token_ids
    tables = [forced_of(row_prefix_ids(source, method, tokenizer, ends), strategy) for source in sources]
    if any(table is not None for table in tables):
        free = np.full(strategy.places, -1, np.int32)
        forced = np.stack([free if table is None else table for table in tables])
    if decode.limit == "source":
        allowed = np.zeros((len(ids), config.model.vocab_size), bool)
        affixes = source_affixes(tokenizer, config.model, config.data.special_tokens)
        for b, of_source in enumerate(ids):
            allowed[b, np.asarray(of_source)] = True
        allowed[:, [*affixes.prefix, *affixes.suffix]] = False  # special tokens do not belong to the text
        allowed[:, [*ends_of(strategy), *(method.extra_allowed_ids(tokenizer) if tokenizer else [])]] = True
    rules = () if answer_format is None else (answer_format.rule(strategy, [None] * len(sources)),)
    return DecodingOptions(sampling=sampling, forced=forced, allowed=allowed, rules=rules, scores=decode.scores)


def sampling_of(source: Source, decode: DecodeConfig) -> Sampling:
    """Returns the distribution from which the tokens of a source's answer are sampled."""
    return Sampling.of(decode, seed_of(source, decode.seed))


def seed_of(source: Source, seed: int) -> int:
    """Returns a 32-bit seed for a source's answer.

    It depends on the source's id and the sample's number, not on the batch.
    """
    digest = hashlib.sha256(f"{seed}/{source.sample}/{source.id}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
