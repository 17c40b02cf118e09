"""The rule against repetition in plain Python, over lists of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

BOS = 0


def without_repetition(
    logits: Any,
    row: Sequence[int],
    above: Sequence[Sequence[int]],
    *,
    penalty: float = 1.0,
    ngram: int = 0,
    given: Sequence[int] = (),
    separators: Sequence[int] = (),
    by_row: bool = False,
    forbidden: float = -np.inf,
) -> np.ndarray:
    """The logits [V] of a query after the rule.

    Args:
      logits: the logits of the model.
      row: the tokens of the query's row, without bos.
      above: the visible tokens of each row above, without bos and end tokens.
      penalty: divides positive logits of repeated tokens, and multiplies negative ones.
      ngram: no sequence of this many tokens is written twice.
      given: for each row, the number of first tokens that are exempt.
      separators: tokens that are exempt.
      by_row: whether rows above, and tokens before the last separator, do not count.
      forbidden: added to the logits of tokens that would repeat a sequence.
    """
    first = [*given, *[0] * (len(above) + 1)]
    own = [BOS, *row]
    last = max((i for i, token in enumerate(own) if i and token in separators), default=-1)
    counts = [i == 0 or (i > first[len(above)] and token not in separators) for i, token in enumerate(own)]
    if by_row:
        counts = [there and i > last for i, there in enumerate(counts)]
    texts = [(own, counts)]
    if not by_row:
        for j, tokens in enumerate(above):
            texts.append(([*tokens], [i >= first[j] and token not in separators for i, token in enumerate(tokens)]))
    changed = np.array(logits)
    if penalty != 1:
        for token in {token for tokens, there in texts for token, count in zip(tokens, there, strict=True) if count}:
            old, by = changed[token], changed.dtype.type(penalty)
            changed[token] = old * by if old < 0 else old / by
    if ngram and len(own) >= ngram - 1 and all(counts[len(own) - ngram + 1 :]):
        context, repeats = own[len(own) - ngram + 1 :], set[int]()
        for tokens, there in texts:
            for i in range(len(tokens) - ngram + 1):
                if all(there[i : i + ngram]) and tokens[i : i + ngram - 1] == context:
                    repeats.add(tokens[i + ngram - 1])
        changed[[*repeats]] += forbidden
    return changed
