"""Checks custom backbones by the rules of a table, with random weights.

All rules use one batch, `Scene`: two sources of different lengths, both longer than 16 tokens, and two
targets on the grid, one of them with positions and distances beyond 64. Shapes as in `pipejax.model.t5`.
"""

import dataclasses
import re
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax import grid, methods
from pipejax.config import Config, DecodeConfig, GridConfig
from pipejax.decoding import strategy_checks
from pipejax.decoding.strategy_checks import expect, refuse
from pipejax.inference.generator import Generator
from pipejax.methods import Ids
from pipejax.methods.losses import cross_entropy
from pipejax.model.backbone import Backbone
from pipejax.model.dropout import STREAM
from pipejax.model.parameters import check_paths
from pipejax.model.sharding import make_mesh, param_shardings
from pipejax.model.slots import Blocks, Slots
from pipejax.system import Tree
from pipejax.testing.answers import compare_records
from pipejax.testing.facts import check_facts
from pipejax.testing.recomputation import (
    LONGEST,
    NEAR,
    SHORT,
    compiled,
    draw_ids,
    random_params,
    teacher_forced,
)
from pipejax.testing.requirements import Requirement, check_all

LENGTHS = (LONGEST, 23)  # the lengths of the sources
DELAYS = (40, 2)  # the delays of the targets
CHUNK = 4  # slots of a step
SHIFTS = (7, 64, 300)  # the numbers added to all positions
BF16 = 0.1  # the largest relative error of logits in bfloat16, root mean square
RATE = 0.3  # the rate of dropout


class Scene(NamedTuple):
    """The arguments of a teacher-forced pass of two examples."""

    source: np.ndarray  # i32 [2, L]
    real: np.ndarray  # bool [2, L]
    tokens: np.ndarray  # i32 [2, N], in the order of times
    mask: np.ndarray  # bool [2, N, N]
    position: np.ndarray  # i32 [2, N]


@dataclasses.dataclass(frozen=True)
class BackboneCase:
    """A backbone that is checked, with random parameters."""

    config: Backbone
    sources: int = 8  # the number of random sources to decode

    @cached_property
    def params(self) -> Tree:
        """Random parameters."""
        return random_params(self.config, self.config.eos_token_id)

    @cached_property
    def flats(self) -> list[grid.Flat]:
        """The targets, with their slots in the order of times, in which steps feed them."""
        rng, ids, found = np.random.default_rng(1), Ids.of(self.config), list[grid.Flat]()
        for delay in DELAYS:
            rows = [draw_ids(rng, self.config, 3, least=3) for _ in range(3)]
            flat = grid.flatten(rows, delay=delay, bos=ids.bos, eos=ids.eos)
            order = np.lexsort((flat.row, flat.time))
            found.append(grid.Flat(*(x[order] for x in flat)))
        return found

    @cached_property
    def counts(self) -> list[int]:
        """The number of slots of each target; the others of the scene are padding."""
        return [len(flat.row) for flat in self.flats]

    @cached_property
    def coordinates(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and times i32 [2, N]. Padding has the row -1."""
        size = -(-max(self.counts) // CHUNK) * CHUNK
        row, time = (np.full((2, size), fill, np.int32) for fill in (-1, 0))
        for i, flat in enumerate(self.flats):
            row[i, : len(flat.row)], time[i, : len(flat.row)] = flat.row, flat.time
        return row, time

    @cached_property
    def scene(self) -> Scene:
        """The batch that all rules use."""
        rng, (row, time) = np.random.default_rng(2), self.coordinates
        source = np.asarray([draw_ids(rng, self.config, LONGEST, least=LONGEST) for _ in LENGTHS], np.int32)
        tokens = np.zeros(row.shape, np.int32)
        for i, flat in enumerate(self.flats):
            tokens[i, : len(flat.row)] = flat.inputs
        mask = grid.visible(row[:, :, None], time[:, :, None], row[:, None], time[:, None])
        mask &= (row >= 0)[:, None] & (row >= 0)[:, :, None]
        real = np.arange(LONGEST) < np.asarray(LENGTHS)[:, None]
        return Scene(source, real, tokens, mask, np.where(row >= 0, grid.position(row, time), 0).astype(np.int32))

    def real_slots(self, x: Any) -> np.ndarray:
        """Returns the entries [.., V] of an array [2, N, V] at slots that are not padding."""
        found: np.ndarray = np.asarray(x)[self.coordinates[0] >= 0]
        return found

    def logits_of(self, scene: Scene, **options: Any) -> np.ndarray:
        """Returns f32 [n, V], the logits of a module with these options at the slots that are not padding."""
        return self.real_slots(teacher_forced(self.config.module(**options), self.params, *scene))

    @cached_property
    def logits(self) -> np.ndarray:
        """The logits of the scene."""
        return self.logits_of(self.scene)

    @cached_property
    def loss_and_gradient(self) -> Any:
        """The compiled function from parameters to a loss and its gradient."""
        return _loss_and_gradient(self)

    def expect_same(self, what: str, found: np.ndarray, expected: np.ndarray | None = None) -> None:
        """Raises a UserError unless logits are equal up to rounding; `expected`: None, the logits of the scene."""
        expected = self.logits if expected is None else expected
        apart = abs(found - expected).max()
        if not apart < NEAR * abs(expected).max():
            refuse(self.config, f"module: {what}", f"logits that change by {apart:.3g}", "the same logits")


def check_backbone(config: Backbone, *, sources: int = 8) -> str:
    """Checks a backbone by the rules of BACKBONE_REQUIREMENTS, which docs/backbones.md lists.

    Args:
      config: the backbone, with small sizes.
      sources: the number of random sources to decode.

    Returns:
      A line that summarises the number of parameters and of compared answers.

    Raises:
      UserError: the backbone breaks a rule. The message names the part, the result, the expected result and the rule.
    """
    case = BackboneCase(config, sources)
    check_all(BACKBONE_REQUIREMENTS, case)
    count = len(flatten_dict(case.params))
    return f"{type(config).__name__}: {count} parameters, and {compare_answers(case)} answers agree with recomputation"


def _check_names(case: BackboneCase) -> None:
    """Checks paths, shapes, dtypes and sharding of parameters, and their names in files."""
    config, owners = case.config, dict[str, str]()
    config.check(type(config).__name__)
    shapes = flatten_dict(jax.eval_shape(config.init_params, jax.random.key(0)), sep="/")
    check_paths(type(config).__name__, {path: x.shape for path, x in shapes.items()}, config)
    for path, (theirs, _) in config.tensors().items():
        if owners.setdefault(theirs, path) != path:
            refuse(config, "tensors", f"{theirs} for {owners[theirs]} and {path}", "different names")
    if lost := sorted({*config.tables} - shapes.keys()):
        refuse(config, "tables", lost[0], f"the path of a parameter: {' or '.join(sorted(shapes))}")
    param_shardings(config, unflatten_dict(shapes, sep="/"), make_mesh(1, 1, 1))  # an error unless each has a rule
    for path, x in shapes.items():
        expect(config, f"init_params: {path}", x, "float32", x.shape)
        axes = next(axes for pattern, axes in config.sharding if re.fullmatch(pattern, path))
        if len(axes) > len(x.shape) or {*axes} - {None, "data", "fsdp", "tensor"}:
            refuse(config, f"sharding: {path}", axes, f"axes of the mesh for shape {[*x.shape]}")


def _check_dtypes(case: BackboneCase) -> None:
    """Compares shapes and dtypes of outputs in bfloat16 with the outputs of `T5`."""
    config, scene, half = case.config, case.scene, case.config.module(dtype=jnp.bfloat16)
    batch, size = scene.tokens.shape

    def apply(method: str, *given: Any) -> Any:
        return jax.eval_shape(lambda *x: half.apply({"params": case.params}, *x, method=method), *given)

    hidden, memory = apply("hidden", *scene), apply("encode", scene.source, scene.real)
    cache = half.empty_cache(batch, size)
    stepped = apply("step", *scene[2:], scene.position, memory, cache, np.zeros(1, np.int32))
    for place, x in (("hidden", hidden), ("step", stepped[0])):
        expect(config, f"module: {place}", x, "bfloat16", (batch, size, hidden.shape[-1]))
    expect(config, "module: logits", apply("logits", hidden), "float32", (batch, size, config.vocab_size))
    expect(config, "module: encode: mask", memory.mask, "bool", scene.real.shape)
    strategy_checks.check_state(config, cache, stepped[1], method="module: step: cache")
    if width := config.head_width():
        keys = memory.keys[0]
        expect(config, "module: encode: keys", keys, "bfloat16", (batch, keys.shape[1], width, LONGEST))


def _check_padding(case: BackboneCase) -> None:
    """Changes the ids in the padding of sources, which must not change the logits."""
    source = np.where(case.scene.real, case.scene.source, Ids.of(case.config).bos)
    case.expect_same("the padding of a source", case.logits_of(case.scene._replace(source=source)))


def _check_sources(case: BackboneCase) -> None:
    """Changes the tokens of the first source one by one: the logits of this example must change, and no others."""
    scene, count = case.scene, case.counts[0]
    for place in (*range(0, LONGEST, 8), 15, 16, 17, LONGEST - 1):
        found = case.logits_of(scene._replace(source=_with(scene.source, (0, place), 4)))
        if np.array_equal(found[:count], case.logits[:count]):
            what = f"module: token {place} of a source of {LONGEST}"
            refuse(case.config, what, "logits that do not depend on it", "other logits for another token")
        case.expect_same("the source of another example", found[count:], case.logits[count:])


def _check_sight(case: BackboneCase) -> None:
    """Changes each token in turn: the logits of the token's slot must change, and other logits only if they see it."""
    scene, own, (row, time) = case.scene, case.coordinates[0] >= 0, case.coordinates
    for example, slot in np.argwhere(own).tolist():
        found = case.logits_of(scene._replace(tokens=_with(scene.tokens, (example, slot), 4)))
        sees = np.zeros(own.shape, bool)
        sees[example] = scene.mask[example, :, slot]
        place = f"row {row[example, slot]}, time {time[example, slot]}"
        case.expect_same(f"a slot that no query sees, at {place}", found[~sees[own]], case.logits[~sees[own]])
        if np.array_equal(found[sees[own]], case.logits[sees[own]]):
            what = f"module: the token fed at {place}"
            refuse(case.config, what, "logits that do not depend on it", "other logits for another token")


def _check_order(case: BackboneCase) -> None:
    """Reverses the order of the slots, which must not change their logits."""
    scene = case.scene
    turned = scene._replace(
        tokens=scene.tokens[:, ::-1], mask=scene.mask[:, ::-1, ::-1], position=scene.position[:, ::-1]
    )
    found = teacher_forced(case.config.module(), case.params, *turned)
    case.expect_same("the order of slots", case.real_slots(np.asarray(found)[:, ::-1]))


def _check_positions(case: BackboneCase) -> None:
    """Shifts all positions, which must not change the logits, if the backbone is relative."""
    for shift in SHIFTS if case.config.is_relative else ():
        moved = case.scene._replace(position=case.scene.position + np.int32(shift))
        case.expect_same(f"positions that all lie {shift} farther", case.logits_of(moved))


def _check_packing(case: BackboneCase) -> None:
    """Packs both targets into one sequence, each with its own source, which must not change their logits."""
    scene, size = case.scene, case.scene.tokens.shape[1]
    example = np.repeat([0, 1], size)
    mask = np.zeros((1, 2 * size, 2 * size), bool)
    for i in range(2):
        mask[0, i * size : (i + 1) * size, i * size : (i + 1) * size] = scene.mask[i]
    of_source = example[:, None] == np.repeat([0, 1], LONGEST)
    packed = scene.source, scene.real, scene.tokens.reshape(1, -1), mask, scene.position.reshape(1, -1), of_source[None]
    found = teacher_forced(case.config.module(), case.params, *packed)
    case.expect_same("two targets packed into a row", case.real_slots(np.asarray(found).reshape(2, size, -1)))


def _check_blocks(case: BackboneCase) -> None:
    """Compares attention in blocks with attention by arrays, if the backbone supports it.

    All rows of the first example are in group 0, and each row of the second example has a group of its own.
    """
    if not case.config.head_width():
        return
    scene, (row, time) = case.scene, case.coordinates
    group = np.where([[False], [True]], np.maximum(row, 0), 0).astype(np.int32)
    slots = Slots(np.where(row >= 0, 0, -1).astype(np.int32), row, time, scene.position, group)
    in_blocks = case.config.module(blocks=Blocks(interpret=True))
    found = teacher_forced(in_blocks, case.params, *scene[:3], slots, scene.position)
    mask = scene.mask & grid.shares_group(group[:, :, None], group[:, None])
    case.expect_same("attention in blocks", case.real_slots(found), case.logits_of(scene._replace(mask=mask)))


def _check_bfloat16(case: BackboneCase) -> None:
    """Compares logits in bfloat16 with logits in float32, by the root mean square of their differences."""
    apart = np.sqrt(np.square(case.logits_of(case.scene, dtype=jnp.bfloat16) - case.logits).mean())
    scale = np.sqrt(np.square(case.logits - case.logits.mean(axis=1, keepdims=True)).mean())
    if not apart < BF16 * scale:
        found = f"logits that differ by {apart / scale:.0%} from those in float32"
        refuse(case.config, "module: dtype bfloat16", found, f"at most {BF16:.0%}, by rounding")


def _loss_and_gradient(case: BackboneCase, **options: Any) -> Any:
    """Returns the compiled function from parameters to the mean loss of random targets and its gradient."""
    own, rng, module = case.coordinates[0] >= 0, np.random.default_rng(3), case.config.module(**options)
    targets = rng.integers(0, case.config.vocab_size, own.shape).astype(np.int32)

    def loss(params: Tree) -> Any:
        logits = module.apply({"params": params}, *case.scene)
        total, count = cross_entropy(logits, jnp.asarray(targets), jnp.asarray(own, jnp.float32))
        return total / count

    return compiled(jax.value_and_grad(loss))


def _check_gradient(case: BackboneCase) -> None:
    """Compares the gradient of each parameter with the slope of the loss, measured by a difference quotient.

    The slope is taken along the gradient, or along a random direction if the gradient is 0.
    """
    function, rng = case.loss_and_gradient, np.random.default_rng(4)
    gradient, flat = (flatten_dict(x, sep="/") for x in (function(case.params)[1], case.params))
    for path, own in gradient.items():
        way = np.asarray(own) if np.any(own) else rng.standard_normal(own.shape)
        way = (way / np.linalg.norm(way)).astype(np.float32)
        # The length is so small that the loss is nearly linear, and so large that rounding does not matter.
        length = min(0.01 * float(np.linalg.norm(flat[path])), 0.01 / (float(np.linalg.norm(own)) or 1e-9))
        ends = [function(unflatten_dict(flat | {path: flat[path] + way * x}, sep="/"))[0] for x in (length, -length)]
        slope, expected = float((own * way).sum()), float(ends[0] - ends[1]) / (2 * length)
        if not abs(slope - expected) < 0.1 * abs(expected) + 2e-5 / length:
            found = f"{slope:.3g} along a direction in which the loss changes by {expected:.3g}"
            refuse(case.config, f"module: gradient of {path}", found, "the same slope")


def _check_remat(case: BackboneCase) -> None:
    """Requires the same loss and gradient with each value of `train.remat`."""
    loss, gradient = case.loss_and_gradient(case.params)
    for remat in ("layers", "dots"):
        other = _loss_and_gradient(case, remat=remat)(case.params)
        if not np.isclose(other[0], loss, rtol=NEAR):
            refuse(case.config, f"module: remat {remat}", f"a loss of {other[0]:.6g}", f"{loss:.6g}, as without remat")
        pairs = zip(flatten_dict(other[1], sep="/").items(), jax.tree.leaves(gradient), strict=True)
        for (path, here), there in pairs:
            apart = float(abs(here - there).max())
            if not apart < 10 * NEAR * (float(abs(there).max()) + NEAR):
                place = f"module: remat {remat}: gradient of {path}"
                refuse(case.config, place, f"a gradient that differs by {apart:.3g}", "the same gradient")


def _check_dropout(case: BackboneCase) -> None:
    """Requires that dropout changes logits only if it is on, and equally with each value of `train.remat`."""
    case.expect_same("dropout that is off", case.logits_of(case.scene, dropout=RATE))
    keys = {name: jax.random.key(i) for i, name in enumerate(("dropout", STREAM))}
    found = []
    for remat in ("none", "layers", "dots"):
        module = case.config.module(dropout=RATE, remat=remat)
        apply = compiled(partial(module.apply, deterministic=False))
        found.append(case.real_slots(apply({"params": case.params}, *case.scene, rngs=keys)))
    if abs(found[0] - case.logits).max() < NEAR * abs(case.logits).max():
        refuse(case.config, "module: dropout", "the same logits as without dropout", "other logits")
    for remat, logits in zip(("layers", "dots"), found[1:], strict=True):
        case.expect_same(f"dropout with remat {remat}", logits, found[0])


def _check_steps(case: BackboneCase) -> None:
    """Feeds the slots by steps, and compares the logits with the logits of the teacher-forced pass.

    The slots are fed twice: once step by step, and once with another step before each step, which feeds
    other tokens and is overwritten.
    """
    scene, module, size = case.scene, case.config.module(), case.scene.tokens.shape[1]
    starts = np.asarray([0, CHUNK], np.int32)  # the first slot of each example
    slots = size + CHUNK

    @compiled
    def encode(params: Tree) -> Any:
        return module.apply({"params": params}, scene.source, scene.real, method="encode")

    @compiled
    def step(params: Tree, *given: Any) -> Any:
        hidden, cache = module.apply({"params": params}, *given, method="step")
        return module.apply({"params": params}, hidden, method="logits"), cache

    memory, place = encode(case.params), np.arange(size)[None] + starts[:, None]
    positions = np.zeros((2, slots), np.int32)
    np.put_along_axis(positions, place, scene.position, axis=1)

    def feed(cache: Tree, first: int, tokens: np.ndarray) -> tuple[np.ndarray, Tree]:
        here, mask = slice(first, first + CHUNK), np.zeros((2, CHUNK, slots), bool)
        known = scene.mask[:, here] & (np.arange(size) < first + CHUNK)
        np.put_along_axis(mask, np.broadcast_to(place[:, None], known.shape), known, axis=2)
        return step(case.params, tokens, mask, scene.position[:, here], positions, memory, cache, starts + first)

    for is_undone, what in ((False, "step"), (True, "step after one that was undone")):
        cache, found = module.empty_cache(2, slots), []
        for first in range(0, size, CHUNK):
            tokens = scene.tokens[:, first : first + CHUNK]
            if is_undone:
                cache = feed(cache, first, np.full_like(tokens, 4))[1]
            logits, cache = feed(cache, first, tokens)
            found.append(np.asarray(logits))
        case.expect_same(what, case.real_slots(np.concatenate(found, axis=1)))


def compare_answers(case: BackboneCase) -> int:
    """Decodes sources of up to 12 and up to 40 tokens, and compares the records with their recomputation.

    Returns:
      The number of compared answers.
    """
    bounds, rng = GridConfig(delay=2, time_max=14, sub_max=4), np.random.default_rng(0)
    generator = Generator(Config(model=case.config, grid=bounds, decode=DecodeConfig(scores=True)), case.params, None)
    method, end = methods.PipelinedMethod(bounds), case.config.eos_token_id
    lengths = [SHORT if i % 2 else LONGEST for i in range(case.sources)]
    given = [[*draw_ids(rng, case.config, most - 1, most // 2), end] for most in lengths]
    records: Sequence[Any] = generator.decode(given, batch_size=4, method=method.name)
    checked = [generator.source(ids, "source", i) for i, ids in enumerate(given)]
    return compare_records(case.config, case.params, method, checked, {"step": [*records]}, case.config)


def _with(x: np.ndarray, place: tuple[int, ...], value: int) -> np.ndarray:
    """Returns a copy of an array with another value at a place."""
    changed = x.copy()
    changed[place] = value
    return changed


BACKBONE_REQUIREMENTS: tuple[Requirement[BackboneCase], ...] = (
    Requirement(
        "names",
        "Parameters are float32, with the paths and shapes of `tensors`; each has its own name in files, and axes.",
        _check_names,
    ),
    Requirement(
        "kept facts",
        "`read_facts` and `fitted` restore every field from `facts`.",
        lambda case: check_facts(case.config),
    ),
    Requirement("dtypes", "Outputs have the shapes and dtypes of the outputs of `T5`.", _check_dtypes),
    Requirement("padding of sources", "Logits do not depend on the padding of sources.", _check_padding),
    Requirement(
        "whole sources",
        "Logits depend on every token of their source, however long it is, and on no other source.",
        _check_sources,
    ),
    Requirement(
        "visible slots", "Logits of a slot depend on its own token, and on no slot that it does not see.", _check_sight
    ),
    Requirement("order of slots", "Logits do not depend on the order of slots.", _check_order),
    Requirement(
        "differences of positions",
        f"If `is_relative`, logits do not change if all positions are shifted, by up to {max(SHIFTS)}.",
        _check_positions,
    ),
    Requirement("packing", "Targets that are packed into one sequence see only their own sources.", _check_packing),
    Requirement(
        "steps", "Decoding by steps, also undone ones, gives the logits of the teacher-forced pass.", _check_steps
    ),
    Requirement("bfloat16", "Logits in bfloat16 differ from those in float32 only by rounding.", _check_bfloat16),
    Requirement("gradient", "The gradient of each parameter is the slope of the loss.", _check_gradient),
    Requirement("remat", "Loss and gradient are the same with each value of `train.remat`.", _check_remat),
    Requirement(
        "dropout", "Dropout changes logits if it is on, and its masks are the same with `train.remat`.", _check_dropout
    ),
    Requirement(
        "attention in blocks", "If `head_width` is not 0, attention in blocks gives the same logits.", _check_blocks
    ),
    Requirement(
        "answers", "Records of pipelined decoding equal a full recomputation.", lambda case: compare_answers(case)
    ),
)
