"""Delivers the results of a running request: its new tokens after each slice of decoding, and finally the record."""

import dataclasses

import jax
import numpy as np

from pipejax.apps.serving.answer import Event, Running
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Decoded
from pipejax.inference.answers import Record, record_of
from pipejax.inference.running_batch import RunningBatch


def deliver_tokens(one: Running, batch: RunningBatch, decoded: Decoded, place: int) -> int:
    """Delivers the new tokens of the request, up to its `max_tokens`.

    Args:
      one: the request.
      batch: the batch of the request.
      decoded: the result of the batch's `advance`.
      place: the place of the request in the batch.

    Returns:
      The number of delivered tokens.
    """
    assert decoded.log_probs is not None, "a `RunningBatch` has log-probabilities"
    most, one.steps = one.answer.request.max_tokens, int(decoded.steps[place])
    new, events = batch.new_tokens(decoded, place, one.lengths), []
    for time, row, j in new[: None if most is None else max(most - one.count, 0)]:
        log_prob = float(decoded.log_probs[place, row, time])
        events.append(Event(row, int(decoded.tokens[place, row, j]), log_prob))
        one.lengths[row] = j + 1
        one.count += 1
    one.answer.give(*events)
    return len(events)


def record_after(
    one: Running, batch: RunningBatch, decoded: Decoded, place: int, *, done: bool, tokenizer: Tokenizer | None
) -> Record:
    """Returns the record of the answer, after `deliver_tokens`.

    Args:
      one: the request.
      batch: the batch of the request.
      decoded: the result of the batch's `advance`.
      place: the place of the request in the batch.
      done: whether decoding is over; if not, the answer has `max_tokens` tokens.
      tokenizer: makes the texts; None: the record has no texts.
    """
    request, strategy, method = one.answer.request, one.answer.kind.strategy, one.answer.kind.method
    only = jax.tree.map(lambda x: x[place : place + 1], decoded)
    kept = np.minimum(only.lengths, one.lengths)
    steps = int(np.where(one.lengths > 0, batch.starts + one.lengths, 0).max())  # up to the answer's last token
    # With drafts the call that generates this token may generate the ends of rows at later time-steps as well.
    done &= not batch.has_drafts or steps >= int(only.steps[0])
    cut = bool((kept < only.lengths).any()) or (one.is_full and not done)
    only = dataclasses.replace(only, lengths=kept, calls=strategy.calls(only))
    if not request.log_probs:
        only = dataclasses.replace(only, log_probs=None)
    record = record_of(
        request.source,
        method,
        only,
        0,
        start=strategy.start,
        config=one.answer.generator.config,
        tokenizer=tokenizer,
        ends=not cut,
    )
    if cut:
        record["truncated"] = "max_tokens"
        record["steps"] = steps
    return record
