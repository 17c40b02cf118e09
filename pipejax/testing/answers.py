"""Compares records of a generator with answers that are decoded by full recomputation."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from pipejax.config import DataConfig
from pipejax.data import make_task
from pipejax.decoding import TRUNCATIONS, Refillable, Rule, Strategy, strategy_checks
from pipejax.inference import decoding_options
from pipejax.inference.decoding_options import Constraints, row_prefixes
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import RunningBatch
from pipejax.inference.sources import Source
from pipejax.methods import Ids, Method
from pipejax.model.backbone import Backbone
from pipejax.system import Tree
from pipejax.testing.recomputation import NEAR, recompute

Records = dict[str, list[Any]]  # the records of each decoder, by its name for messages


def compare_records(
    model: Backbone,
    params: Tree,
    method: Method,
    given: Sequence[Source],
    runs: Records,
    owner: object,
    rules: Sequence[Rule] = (),
) -> int:
    """Compares records with `recompute`, except for answers that rounding may change.

    Args:
      model: the backbone.
      params: its parameters.
      method: the method that decodes.
      given: the sources.
      runs: the records.
      owner: the object that is checked, for messages.
      rules: changes of logits.

    Returns:
      The number of compared answers.

    Raises:
      UserError: a record differs from its recomputation, or fewer than half of the answers can be compared.
    """
    compared = 0
    for i, source in enumerate(given):
        expected, is_sure = expected_record(model, params, method, source, rules)
        if not is_sure:
            continue
        compared += 1
        is_forced = bool(row_prefixes(source, method).prefixes)
        for run, record in ((run, records[i]) for run, records in runs.items() if i < len(records)):
            for key in (key for key in expected if key in record):
                if key == "calls" and (is_forced or run.startswith("drafts")):  # both save calls
                    if not 0 < record[key] <= expected[key]:
                        place = f"{run}: source {i}: {key}"
                        strategy_checks.refuse(
                            owner, place, record[key], f"1 to {expected[key]}, the calls of one token of a row each"
                        )
                elif not _is_near(record[key], expected[key]):
                    strategy_checks.refuse(
                        owner, f"{run}: source {i}: {key}", record[key], f"{expected[key]}, as recomputed"
                    )
    if compared < len(given) // 2:
        strategy_checks.refuse(
            owner, "decode", f"{compared} of {len(given)} answers that rounding cannot change", "half or more"
        )
    return compared


def expected_record(
    model: Backbone, params: Tree, method: Method, source: Source, rules: Sequence[Rule] = ()
) -> tuple[dict[str, Any], bool]:
    """Computes the fields of a source's record by full recomputation, and whether rounding cannot change them."""
    strategy, words = method.strategy(Ids.of(model)), make_task(DataConfig(task="demo")).tokenizer()
    known = decoding_options.row_prefix_ids(source, method, words, model.end_token_ids)
    forced, content = decoding_options.forced_of(known, strategy), [int(x) for x in source.content]
    found, log_probs, margin = recompute(model, params, strategy, content, forced, rules)
    tokens, lengths = found.tokens[0], found.lengths[0].tolist()
    order = method.order(lengths)
    assert found.calls is not None, "`recompute` counts them"
    expected: dict[str, Any] = {
        "row_ids": [tokens[k, : lengths[k]].tolist() for k in order],
        "steps": int(found.steps[0]),
        "calls": int(found.calls[0]),
        "truncated": TRUNCATIONS[int(found.truncated[0])],
    }
    if log_probs:
        starts = [int(strategy.start(k)) for k in range(len(tokens))]
        scores = [[log_probs.get((k, starts[k] + j), 0.0) for j in range(n + 1)] for k, n in enumerate(lengths)]
        count, least = method.count_rows(len(tokens), known.most), 1 + max(order, default=-1)
        if not least <= count <= len(tokens):
            expected_count = f"{least}, up to the last row with tokens, to {len(tokens)}, the rows of the grid"
            strategy_checks.refuse(method, "count_rows", count, expected_count)
        whole = sum(map(sum, scores[:count]))
        expected |= {"log_probs": [scores[k][:-1] for k in order], "log_prob": whole}
    return expected, margin >= NEAR


def _is_near(found: Any, expected: Any) -> bool:
    """Returns whether two values of records are equal, floats up to rounding."""
    here, there = (jax.tree.flatten(x) for x in (found, expected))
    near = zip(here[0], there[0], strict=False)
    return str(here[1]) == str(there[1]) and all(
        np.isclose(a, b, atol=1e-2) if isinstance(a, float) else a == b for a, b in near
    )


def stream(
    generator: Generator,
    method: Method,
    given: Sequence[Source],
    rules: tuple[Rule, ...] = (),
    strategy: Strategy | None = None,
) -> list[Any]:
    """Decodes sources in a running batch of two places, reads the answers token by token, and returns their records.

    Args:
      generator: the generator.
      method: the method that decodes.
      given: the sources.
      rules: the rules of all answers.
      strategy: the strategy; None: the method's.
    """
    batch = RunningBatch(generator.programs, cast(Refillable, strategy or method.strategy(generator.ids)), 2)
    at, records, waiting = dict[int, int](), [dict[str, Any]() for _ in given], [*range(len(given))]
    rows: list[list[list[int]]] = [[[] for _ in batch.starts] for _ in given]
    known = decoding_options.row_prefix_ids(given[0], method, generator.tokenizer, generator.ids.ends)
    batch.give(Constraints(decoding_options.forced_of(known, batch.strategy), rules=rules))
    while waiting or at:
        while waiting and batch.free:
            source = waiting.pop(0)
            at[batch.add(generator.ids_of(given[source]), log_probs=False)] = source
        decoded, done = batch.advance(2)
        for place, i in [*at.items()]:
            for _, row, j in batch.new_tokens(decoded, place, np.asarray([*map(len, rows[i])])):
                rows[i][row].append(int(decoded.tokens[place, row, j]))
            if done[place]:
                del at[place]
                batch.drop(place)
                order = method.order([*map(len, rows[i])])
                records[i] = {
                    "row_ids": [rows[i][k] for k in order],
                    "steps": int(decoded.steps[place]),
                    "truncated": TRUNCATIONS[int(decoded.truncated[place])],
                }
    return records
