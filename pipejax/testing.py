"""Checks custom methods and backbones by comparing their results with a full recomputation on a toy model.

The toy model has few words, random weights, and sources of mixed lengths. The recomputation runs the teacher-forced
model on all tokens fed so far at every step, with the mask of training and the strategy's positions. It uses no cache,
no packing of queries and no batches.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax import grid, methods
from pipejax.config import Config, DecodeConfig, GridConfig, T5Config
from pipejax.data import demo
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import TRUNCATIONS, Decoded, Query, Refillable, Strategy, strategy_checks
from pipejax.decoding.choice import first_argmax
from pipejax.inference import decoding_options
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import RunningBatch
from pipejax.inference.sources import Source
from pipejax.methods import Ids, Method
from pipejax.model.backbone import Backbone, Module
from pipejax.model.parameters import check_paths
from pipejax.model.sharding import make_mesh, param_shardings
from pipejax.model.slots import Blocks, Slots
from pipejax.system import Tree
from pipejax.system.strict_json import JsonMapping, JsonObject

Array = jax.Array

MOST, LONGEST = 64, 12  # the most tokens of a target, and of a source
NEAR = 1e-4  # relative differences below this are explained by rounding
TOY = T5Config(64, 16, 8, 24, 2, 1, 1, relative_attention_num_buckets=8, relative_attention_max_distance=20)
# The fields of sources that test the abilities "prefix" and "rows".
PREFIXED: dict[str, JsonObject] = {
    "prefix": {"row_prefixes": [[3]]},
    "rows": {"row_prefixes": [[3], [4]], "max_rows": 2},
}
Cell = tuple[int, int, int]  # row, time, token
Runs = dict[str, Sequence[JsonMapping]]  # the records of each way of decoding


def check_method(
    method: Method, *, model: Backbone = TOY, targets: Sequence[Sequence[str]] = (), sources: int = 8
) -> str:
    """Checks a method: compares layouts, answers, scores, streams, prefixes and drafts with their recomputation.

    Args:
      method: the method. It should have few rows and times, as each step is recomputed.
      model: the backbone, if the method needs another one than the toy.
      targets: the rows of targets, if the method does not accept the default ones.
      sources: the number of random sources to decode.

    Returns:
      A line that summarises the number of compared layouts and answers.

    Raises:
      UserError: the method breaks a rule. The message names the part, the result and the expected result.
    """
    ids, words, rng = Ids.of(model), demo.DemoTask().tokenizer(), np.random.default_rng(0)
    method.check()
    strategy, can, size = methods.strategy_of(method, ids), method.can, (1, 2, 3, 1, 4, 2, 3, 5)
    given = targets or [[words.decode(_draw(rng, model, 4)) for _ in range(n)] for n in size]
    whole = sum(_check_layout(method, strategy, rows, model, words, f"target {i}") for i, rows in enumerate(given))
    if not whole:
        strategy_checks.refuse(method, "target", f"none of {len(given)} that decoding writes whole", "some")
    params = random_params(model, strategy.eos)
    generator = Generator(Config(model=model, method=method, decode=DecodeConfig(scores="score" in can)), params, words)
    plain: list[JsonObject] = [{"source_ids": [*_draw(rng, model, LONGEST - 1), ids.eos]} for _ in range(sources)]
    listed = plain + [record | PREFIXED[key] for key in PREFIXED if key in can for record in plain[:3]]
    checked = [generator.source(record, f"source {i}", i) for i, record in enumerate(listed)]
    runs: Runs = {"decode": generator.decode(listed, batch_size=4)}
    if "draft" in can:
        runs["drafts"] = generator.decode(listed, batch_size=1, draft="source", draft_tokens=2)
    if {"stream", "serve"} & can:
        runs["stream"] = _streamed(generator, method, checked[:sources])
    compared = _compare_records(model, params, method, checked, runs, method)
    return (
        f"{type(method).__name__}: {whole} layouts and {compared} answers agree with recomputation ({', '.join(runs)})"
    )


def check_backbone(config: Backbone, *, sources: int = 8) -> str:
    """Checks a backbone: its names, shapes and shardings, and its outputs and answers against their recomputation.

    Args:
      config: the backbone, with small sizes.
      sources: the number of random sources to decode.

    Returns:
      A line that summarises the number of parameters and of compared answers.

    Raises:
      UserError: the backbone breaks a rule. The message names the part, the result and the expected result.
    """
    name, owners = type(config).__name__, dict[str, str]()
    config.check(name)
    shapes = flatten_dict(jax.eval_shape(config.init_params, jax.random.key(0)), sep="/")
    check_paths(name, {path: x.shape for path, x in shapes.items()}, config)
    for path, (theirs, _) in config.tensors().items():
        if owners.setdefault(theirs, path) != path:
            strategy_checks.refuse(config, "tensors", f"{theirs} for {owners[theirs]} and {path}", "a name for each")
    if lost := sorted({*config.tables} - shapes.keys()):
        strategy_checks.refuse(config, "tables", lost[0], f"some of {', '.join(sorted(shapes))}")
    param_shardings(config, unflatten_dict(shapes, sep="/"), make_mesh(1, 1, 1))  # a rule for each
    for path, x in shapes.items():
        strategy_checks.expect(config, f"init_params: {path}", x, "float32", x.shape)
        axes = next(axes for pattern, axes in config.sharding if re.fullmatch(pattern, path))
        if len(axes) > len(x.shape) or {*axes} - {None, "data", "fsdp", "tensor"}:
            strategy_checks.refuse(config, f"sharding: {path}", axes, f"axes of the mesh for shape {[*x.shape]}")
    params, bounds = random_params(config, config.eos_token_id), GridConfig(delay=2, time_max=14, sub_max=4)
    _check_passes(config, params)
    generator = Generator(Config(model=config, grid=bounds, decode=DecodeConfig(scores=True)), params, None)
    rng, method = np.random.default_rng(0), methods.PipelinedMethod(bounds)
    given = [[*_draw(rng, config, LONGEST - 1), config.eos_token_id] for _ in range(sources)]
    records = generator.decode(given, batch_size=4, method=method.name)
    checked = [generator.source(ids, "source", i) for i, ids in enumerate(given)]
    compared = _compare_records(config, params, method, checked, {"step": records}, config)
    return f"{name}: {len(shapes)} parameters, and {compared} answers agree with recomputation"


def _check_passes(config: Backbone, params: Tree) -> None:
    """Raises a UserError if outputs have other shapes or dtypes than the outputs of `T5`, or depend on masked inputs.

    The logits must not change with the padding of sources, with the order of slots, or with slots that are not visible.
    If the backbone is relative, they must not change if all positions are shifted. Attention in blocks must give the
    same logits, if it is supported, and a step that is undone must not change later steps.
    """
    rng, ids, half = np.random.default_rng(1), Ids.of(config), config.module(dtype=jnp.bfloat16)
    flat = grid.flatten([_draw(rng, config, 4) for _ in range(3)], delay=2, bos=ids.bos, eos=ids.eos)
    size, last = len(flat.row), len(flat.row) - 1
    mask = grid.visible(flat.row[:, None], flat.time[:, None], flat.row, flat.time)[None]
    source, real = np.asarray([_draw(rng, config, 9, 9)], np.int32), np.arange(9)[None] < 5
    given = source, real, flat.inputs[None], mask, grid.position(flat.row, flat.time)[None]
    found = np.asarray(_logits(config.module(), params, *given))
    strategy_checks.expect(config, "module: logits", found, "float32", (1, size, config.vocab_size))

    def apply(method: str, *given: Tree) -> Tree:
        return jax.eval_shape(lambda *x: half.apply({"params": params}, *x, method=method), *given)

    hidden, memory, cache = apply("hidden", *given), apply("encode", source, real), half.empty_cache(1, size)
    stepped = apply("step", *given[2:], given[4], memory, cache, np.zeros(1, np.int32))
    for place, x in (("hidden", hidden), ("step", stepped[0])):
        strategy_checks.expect(config, f"module: {place}", x, "bfloat16", (1, size, hidden.shape[-1]))
    strategy_checks.expect(config, "module: logits", apply("logits", hidden), "float32", found.shape)
    strategy_checks.expect(config, "module: encode: mask", memory.mask, "bool", real.shape)
    strategy_checks.check_state(config, cache, stepped[1])
    if width := config.head_width():
        strategy_checks.expect(
            config, "module: encode: keys", memory.keys[0], "bfloat16", (1, memory.keys[0].shape[1], width, 9)
        )
        slots = Slots(np.zeros((1, size), np.int32), flat.row[None], flat.time[None], given[4])
        in_blocks = config.module(blocks=Blocks(interpret=True))
        _check_near(config, "attention in blocks", _logits(in_blocks, params, *given[:3], slots, given[4]), found)
    order, unseen = rng.permutation(size), ~mask[0, :, last]
    turned = given[2][:, order], mask[:, order][:, :, order], given[4][:, order]
    other, moved = np.where(np.arange(size) == last, ids.eos, given[2]), given[4] + 7
    for what, others, places, kept in (
        ("the padding of a source", (np.where(real, source, ids.bos), *given[1:]), order, order),
        ("positions that all lie 7 farther", (*given[:4], moved), order, order),
        ("the order of slots", (*given[:2], *turned), np.arange(size), order),
        ("a slot that no query sees", (*given[:2], other, *given[3:]), unseen, unseen),
    ):
        if others[4] is moved and not config.is_relative:
            continue
        changed = np.asarray(_logits(config.module(), params, *others))
        _check_near(config, what, changed[:, places], found[:, kept])

    @jax.jit
    def after_steps(params: Tree) -> tuple[Array, ...]:
        """The outputs of the last step after the earlier steps, without and with an undone step in between."""
        call = partial(config.module().apply, {"params": params})
        memory, position = call(*given[:2], method="encode"), given[4]

        def step(cache: Tree, first: int, count: int, *, counts: bool = True) -> tuple[Array, Tree]:
            here, known = np.arange(first, first + count), np.arange(size) < first + count * counts
            seen = mask[:, here] & known & counts
            place = position[:, here], position, memory, cache, np.asarray([first])
            found: tuple[Array, Tree] = call(given[2][:, here], seen, *place, method="step")
            return found

        cache = step(config.module().empty_cache(1, size), 0, size - 3)[1]
        return tuple(step(x, size - 3, 1)[0] for x in (cache, step(cache, size - 3, 3, counts=False)[1]))

    outputs = [np.asarray(x) for x in after_steps(params)]
    apart = abs(outputs[0] - outputs[1]).max()
    if not apart < NEAR * abs(outputs[0]).max():
        change = f"outputs that change by {apart:.3g} after an undone step"
        strategy_checks.refuse(config, "module: step", change, "the same outputs")


def _check_near(config: Backbone, what: str, changed: Array | np.ndarray, found: np.ndarray) -> None:
    """Raises a UserError unless logits are equal up to rounding.

    Args:
      config: the backbone, for the message.
      what: the description of the change after which the logits must be the same.
      changed: the logits after the change.
      found: the original logits.
    """
    apart = abs(np.asarray(changed) - found).max()
    if not apart < NEAR * abs(found).max():
        strategy_checks.refuse(config, f"module: {what}", f"logits that change by {apart:.3g}", "the same logits")


def recompute(
    model: Backbone, params: Tree, strategy: Strategy, source: Sequence[int], forced: np.ndarray | None = None
) -> tuple[Decoded, dict[tuple[int, int], float], float]:
    """Decodes a source by full recomputation.

    Args:
      model: the backbone.
      params: its parameters.
      strategy: the strategy.
      source: the ids of the source.
      forced: i32 [R, W], the token to generate at each row and time, -1: any; None: none.

    Returns:
      The result, as a batch of one; the log-probability of the token generated at each row and time; and the smallest
      difference between the two highest logits of a query, inf if all tokens are forced.
    """
    fed, alive, log_probs, margins = list[Cell](), list[bool](), dict[tuple[int, int], float](), [np.inf]
    size = 1 << (strategy.slots - 1).bit_length()  # one size for all passes, so that the model is compiled once
    ids = np.resize([*source, *[0] * LONGEST], (1, LONGEST)).astype(np.int32)

    def answer(query: Query) -> np.ndarray:
        new = _cells(query)
        fed.extend(new)
        alive.extend([True] * len(new))
        row, time, token = np.pad(np.asarray(fed, np.int32).T, ((0, 0), (0, size - len(fed))))
        mask = grid.visible(row[:, None], time[:, None], row, time) & np.resize([*alive, *[False] * size], size)
        position = np.asarray(strategy.position(row, time))[None]
        given = ids, np.arange(LONGEST)[None] < len(source), token[None], mask[None], position
        logits = np.asarray(_logits(model.module(), params, *given))[0, len(fed) - len(new) : len(fed)]
        chosen = np.array((strategy.choose or first_argmax)(jnp.asarray(logits.T)))
        for i, (r, t, _) in enumerate(new):
            forced_token = -1 if forced is None else int(forced[r, t])
            chosen[i] = chosen[i] if forced_token < 0 else forced_token
            log_probs[r, t] = float(jax.nn.log_softmax(logits[i])[chosen[i]])
            margins.append(np.inf if forced_token >= 0 else float(np.diff(np.sort(logits[i])[-2:])[0]))
        answers = np.zeros(query.live.shape, np.int32)
        answers[query.live] = chosen
        return answers

    for query, _, decoded, kept in strategy_checks.walk(strategy, answer):  # noqa: B007
        alive[len(alive) - int(query.live.sum()) :] = kept[query.live].tolist()
    return decoded, log_probs, min(margins)


def _compare_records(
    model: Backbone,
    params: Tree,
    method: Method,
    given: Sequence[Source],
    runs: Runs,
    owner: object,
) -> int:
    """Compares records with `recompute`, except for answers that rounding may change.

    Args:
      model: the backbone.
      params: its parameters.
      method: the method that decodes.
      given: the sources.
      runs: the records of each way of decoding, by its name for messages.
      owner: the object that is checked, for messages.

    Returns:
      The number of compared answers. A UserError is raised if it is less than half of the sources.
    """
    strategy, words, compared = method.strategy(Ids.of(model)), demo.DemoTask().tokenizer(), 0
    for i, source in enumerate(given):
        known = decoding_options.row_prefix_ids(source, method, words, model.end_token_ids)
        forced, content = decoding_options.forced_of(known, strategy), [int(x) for x in source.content]
        found, log_probs, margin = recompute(model, params, strategy, content, forced)
        if margin < NEAR:
            continue
        compared, tokens, lengths = compared + 1, found.tokens[0], found.lengths[0].tolist()
        order = method.order(lengths)
        starts = [int(strategy.start(k)) for k in range(len(tokens))]
        scores = [[log_probs.get((k, starts[k] + j), 0.0) for j in range(n + 1)] for k, n in enumerate(lengths)]
        expected = {
            "row_ids": [tokens[k, : lengths[k]].tolist() for k in order],
            "steps": int(found.steps[0]),
            "truncated": TRUNCATIONS[int(found.truncated[0])],
            "log_probs": [scores[k][:-1] for k in order],
            "log_prob": sum(map(sum, scores[: method.count_rows(len(tokens), known.most)])),
        }
        for run, key in ((run, key) for run in runs for key in expected if i < len(runs[run]) and key in runs[run][i]):
            here, there = (jax.tree.flatten(x) for x in (runs[run][i][key], expected[key]))
            near = zip(here[0], there[0], strict=False)
            if str(here[1]) != str(there[1]) or not all(
                np.isclose(a, b, atol=1e-2) if isinstance(a, float) else a == b for a, b in near
            ):
                strategy_checks.refuse(
                    owner, f"{run}: source {i}: {key}", runs[run][i][key], f"{expected[key]}, as recomputed"
                )
    if compared < len(given) // 2:
        strategy_checks.refuse(
            owner, "decode", f"{compared} of {len(given)} answers that rounding cannot change", "half or more"
        )
    return compared


def _streamed(generator: Generator, method: Method, given: Sequence[Source]) -> list[JsonObject]:
    """The records of sources that are decoded in a running batch of two places, read token by token."""
    batch = RunningBatch(generator.programs, cast(Refillable, method.strategy(generator.ids)), 2)
    at, records, waiting = dict[int, int](), [JsonObject() for _ in given], [*range(len(given))]
    rows: list[list[list[int]]] = [[[] for _ in batch.starts] for _ in given]
    known = decoding_options.row_prefix_ids(given[0], method, generator.tokenizer, generator.ids.ends)
    batch.give(decoding_options.forced_of(known, batch.strategy))
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
                records[i] = {"row_ids": [rows[i][k] for k in order], "steps": int(decoded.steps[place])}
    return records


def _check_layout(
    method: Method, strategy: Strategy, rows: Sequence[str], model: Backbone, words: Tokenizer, where: str
) -> bool:
    """Decodes a target with the target's tokens as answers, and compares the tokens that each slot sees.

    Raises a UserError if a slot with a weight sees other tokens in training than in decoding, or if the rows that
    `Method.read` returns are not the rows of the target.

    Args:
      method: the method.
      strategy: its strategy.
      rows: the rows of the target.
      model: the backbone.
      words: the tokenizer.
      where: the name of the target, for messages.

    Returns:
      Whether the whole target was decoded, and neither the layout nor the answer was cut.
    """
    target = method.target(rows, words, Ids.of(model), most=MOST, where=where)
    methods.check_target(target, method, vocabulary=model.vocab_size, most=MOST, where=where)
    flat, fed, asked = target.flat, set[Cell](), dict[tuple[int, int], set[Cell]]()
    learned = [*zip(flat.row.tolist(), flat.time.tolist(), flat.inputs.tolist(), strict=True)]
    if len({cell[:2] for cell in learned}) < len(learned):
        strategy_checks.refuse(method, f"target: {where}", "two slots of one row and time", "one each")
    answers = dict(
        zip((cell[:2] for cell in learned), flat.targets.reshape(len(learned), -1)[:, 0].tolist(), strict=True)
    )

    def answer(query: Query) -> np.ndarray:
        new = _cells(query)
        fed.update(new)
        asked.update({(r, t): {cell for cell in fed if grid.visible(r, t, *cell[:2])} for r, t, _ in new})
        found = np.zeros(query.live.shape, np.int32)
        found[query.live] = [answers.get((r, t), strategy.eos) for r, t, _ in new]
        return found

    *_, (_, _, decoded, _) = strategy_checks.walk(strategy, answer)
    whole = not target.was_cut and not decoded.truncated[0]
    for (r, t, _), weight in zip(learned, flat.weights.reshape(len(learned), -1).max(axis=1), strict=True):
        if weight and (whole or (r, t) in asked):
            sees, saw = {cell for cell in learned if grid.visible(r, t, *cell[:2])}, asked.get((r, t), set())
            if sees != saw:
                found = (
                    f"(row, time, token) {sorted(sees - saw)} only in training, {sorted(saw - sees)} only in decoding"
                )
                strategy_checks.refuse(
                    method, f"target: {where}: the slot at row {r}, time {t}", found, "to see the same"
                )
    lengths = decoded.lengths[0].tolist()
    read = method.read([words.decode(decoded.tokens[0, k, : lengths[k]]) for k in method.order(lengths)], " ; ")[1]
    if whole and read != [*rows]:
        strategy_checks.refuse(method, f"read: {where}", read, f"{[*rows]}, the rows of the target")
    return whole


def random_params(config: Backbone, eos: int, seed: int = 0) -> Tree:
    """Random parameters with which greedy answers vary.

    With the negative scale of the decoder's last norm, a token makes its own repetition unlikely. The embedding of
    `eos` is scaled by 1.5, so that it is generated more often.
    """
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    drawn, fresh = flatten_dict(jax.eval_shape(config.init_params, key), sep="/"), dict[str, Array]()
    center: Array | float
    for path, x in drawn.items():
        gain = 3 if re.search("(?<!cross_)attention/output", path) else 1
        if path.endswith("norm/scale"):
            center, scale = -1 if path == "decoder/norm/scale" else 1, 0.2
        elif path.endswith("kernel"):
            center, scale = 0, gain * x.shape[0] ** -0.5
        elif path.endswith("embedding"):
            center, scale = 0, 4 if "relative_bias" in path else 1.5
        else:
            fresh = fresh or flatten_dict(jax.jit(config.init_params)(key), sep="/")
            center, scale = fresh[path], 0.2
        drawn[path] = np.asarray(center + scale * rng.standard_normal(x.shape), np.float32)
        if path in config.tables:
            drawn[path][eos] *= 1.5
    return unflatten_dict(drawn, sep="/")


@partial(jax.jit, static_argnums=0)
def _logits(module: Module, params: Tree, *given: Array | np.ndarray | Slots) -> Array:
    """The teacher-forced logits of a module; compiled once for each module and shape."""
    return module.apply({"params": params}, *given)


def _cells(query: Query) -> list[Cell]:
    """Row, time and token of the live queries of the first example."""
    live = np.asarray(query.live[0])
    return [*zip(*(np.asarray(x[0])[live].tolist() for x in (query.row, query.time, query.tokens)), strict=True)]


def _draw(rng: np.random.Generator, model: Backbone, most: int, least: int = 1) -> list[int]:
    """A random number of ids of words, from `least` to `most`. Ids that a method or `PREFIXED` may use are excluded."""
    return rng.integers(5, min(model.vocab_size, 58) - 4, rng.integers(least, most + 1)).tolist()
