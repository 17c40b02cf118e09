"""Checks a rule of a user: its results for random queries, and answers with it against a full recomputation."""

import dataclasses
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from pipejax import methods
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig
from pipejax.data import make_task
from pipejax.decoding import FORBIDDEN, Rule, create_rule, strategy_checks
from pipejax.inference import decoding_options
from pipejax.inference.answers import Record, record_of
from pipejax.inference.generator import Generator
from pipejax.inference.report import Report
from pipejax.methods import Ids, PipelinedMethod, SequentialMethod
from pipejax.system.errors import UserError, first_line
from pipejax.testing.answers import Records, compare_records, stream
from pipejax.testing.recomputation import NEAR, SHORT, TOY, GivenQueries, draw_ids, random_params

ROWS, WIDTH, QUERIES, EXAMPLES = 4, 9, 24, 3  # the sizes of the random queries


def check_rule(kind: type[Rule], *, sources: int = 8) -> str:
    """Checks a rule: its results for random queries, and answers with it against their recomputation.

    The rule is applied to a toy model of 64 tokens with a tokenizer of words, with the pipelined and the sequential
    decoder, in batches, in a running batch and, if it has no state, with drafts.

    Args:
      kind: the class, as `decode.rules` names it.
      sources: the number of random sources to decode.

    Returns:
      A line that summarises the number of compared answers.

    Raises:
      UserError: the class breaks the contract of `Rule`. The message names the part, the result and the expected one.
    """
    words, rng, ids = make_task(DataConfig(task="demo")).tokenizer(), np.random.default_rng(0), Ids.of(TOY)
    decode, compared = DecodeConfig(scores=True, max_length=12), 0
    drafts = dataclasses.replace(decode, draft="source", draft_tokens=2)
    config, params = Config(model=TOY, decode=decode), random_params(TOY, ids.eos)
    generator = Generator(config, params, words)
    given = [[*draw_ids(rng, TOY, SHORT - 1), ids.eos] for _ in range(sources)]
    checked = [generator.source(one, f"source {i}", i) for i, one in enumerate(given)]
    for method in (PipelinedMethod(GridConfig(time_max=12, sub_max=ROWS)), SequentialMethod.of(config)):
        rule = create_rule(kind, methods.strategy_of(method, ids), words, "rule")
        _check_apply(rule, np.random.default_rng(1))
        has_state = bool(jax.tree.leaves(rule.init(1, 1)))
        runs: Records = {}
        # Drafts are verified one source at a time, since a larger batch compiles more programs.
        for name, settings, size in (("decode", decode, sources), *(() if has_state else (("drafts", drafts, 1),))):
            strategy, records = methods.make_strategy(method, settings, ids), list[Record]()
            for first in range(0, sources, size):
                part, own = checked[first : first + size], given[first : first + size]
                options = decoding_options.of_batch(part, own, method, strategy, config=config, tokenizer=words)
                options = dataclasses.replace(options, rules=(rule,))
                found = generator.programs.decode(
                    own, strategy, batch_size=size, across=1, report=Report(), options=options
                )
                records += [
                    record_of(source, method, found, i, start=strategy.start, config=config, tokenizer=words)
                    for i, source in enumerate(part)
                ]
            runs[name] = records
        runs["stream"] = stream(generator, method, checked, (rule,))
        compared += compare_records(TOY, params, method, checked, runs, rule, (rule,))
    return f"{kind.__name__}: {compared} answers agree with recomputation"


def _check_apply(rule: Rule, rng: np.random.Generator) -> None:
    """Raises a UserError if the results of `Rule.apply` for random queries break the contract.

    Args:
      rule: the rule.
      rng: draws the queries.
    """
    example, row = rng.integers(0, EXAMPLES, QUERIES), rng.integers(0, ROWS, QUERIES)
    length, above_length = rng.integers(0, WIDTH, QUERIES), rng.integers(0, WIDTH + 1, (QUERIES, ROWS))
    above_length = np.where(np.arange(ROWS) < row[:, None], above_length, 0)
    prefix, above = (rng.integers(2, TOY.vocab_size, shape) for shape in ((QUERIES, WIDTH), (QUERIES, ROWS, WIDTH)))
    logits = (3 * rng.standard_normal((TOY.vocab_size, QUERIES))).astype(np.float32)
    state, places = rule.init(EXAMPLES, ROWS), np.arange(WIDTH)

    def queries(order: np.ndarray, rest: int = 0, example: np.ndarray = example) -> GivenQueries:
        """Returns the queries in an order, with the token `rest` at places that they do not see.

        `example`: the number of each query's example.
        """
        known = (
            *(np.where(places < length[:, None], prefix, rest), length),
            *(np.where(places < above_length[:, :, None], above, rest), above_length),
        )
        return GivenQueries(example[order], row[order], (row + length)[order], [x[order] for x in known])

    def refuse(found: str, expected: str) -> NoReturn:
        strategy_checks.refuse(rule, "apply", found, expected)

    whole, order = np.arange(QUERIES), rng.permutation(QUERIES)
    try:
        found = np.asarray(jax.jit(lambda x: rule.apply(x, queries(whole), state))(logits))
    except UserError:
        raise
    except Exception as error:
        refuse(f"{type(error).__name__} under jax.jit: {first_line(error)}", "a function that JAX can compile")
    strategy_checks.expect(rule, "apply", found, "float32", logits.shape, of=", the logits that it was given")
    if not (found < np.inf).all():
        refuse("NaN or infinity", "numbers, or FORBIDDEN")
    if not (found > FORBIDDEN).any(axis=0).all():
        refuse("no allowed token for a query", "at least one for each query")
    for what, given, columns in (
        ("in a second call", queries(whole), whole),
        ("with tokens that no query sees", queries(whole, rest=7), whole),
        ("with tokens that no query sees", queries(whole, rest=TOY.vocab_size - 1), whole),
        ("for other numbers of the examples", queries(whole, example=EXAMPLES - 1 - example), whole),
        ("in another order of the queries", queries(order), order),
        ("beside other queries", queries(order[:5]), order[:5]),
        ("beside other queries", queries(order[5:]), order[5:]),
    ):
        again = np.asarray(rule.apply(jnp.asarray(logits[:, columns]), given, state))
        near = NEAR * float(abs(logits).max())
        if again.shape != found[:, columns].shape or not np.allclose(again, found[:, columns], rtol=0, atol=near):
            refuse(f"other logits {what}", "the same logits")
