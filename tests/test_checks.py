"""`check_method` and `check_backbone` refuse each part that breaks a rule, in one line with the rule's name."""

import dataclasses
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import UserError, grid, methods, testing
from pipejax.config import METHODS, GridConfig, T5Config
from pipejax.decoding import TRUNCATIONS, Decoded, Pipelined
from pipejax.methods import Beams, Method, PipelinedMethod, RowPrefixes, SequentialMethod, Target
from pipejax.methods.losses import cross_entropy
from pipejax.model import layers, t5
from pipejax.model.slots import Slots
from pipejax.testing import BACKBONE_REQUIREMENTS, METHOD_REQUIREMENTS, BackboneCase, MethodCase
from support.branching import Branching
from support.foreign import Lines, Uneven
from support.staggered import Staggered

BOUNDS = GridConfig(delay=1, time_max=14, sub_max=4)
Piece = Callable[[], Any]


def ours(bounds: GridConfig = BOUNDS, **parts: Any) -> Piece:
    """The pipelined method with other parts."""
    return lambda: type("Ours", (PipelinedMethod,), {"name": "ours", **parts})(bounds)


def stepping(bounds: GridConfig = BOUNDS, **parts: Any) -> Piece:
    """The pipelined method with other parts of its strategy."""
    kind = type("Steps", (Pipelined,), parts)

    def strategy(self: Any, ids: Any) -> Any:
        bounds = {"delay": self.grid.delay, "time_max": self.grid.time_max, "sub_max": self.grid.sub_max}
        return kind(**bounds, bos=ids.bos, eos=ids.eos)

    return ours(bounds, strategy=strategy, can=PipelinedMethod.can - {"draft"})


def uneven(**parts: Any) -> Piece:
    """A foreign method with other parts of its strategy."""
    return lambda: type("Own", (Uneven,), {"name": "own", "steps": type("Steps", (Lines,), parts)})()


def sequential(**parts: Any) -> Piece:
    """The sequential method with other parts."""
    return lambda: type("Own", (SequentialMethod,), {"name": "own", **parts})(24, " ; ", 1)


def with_flat(change: Callable[[grid.Flat], grid.Flat], base: type[Method] = PipelinedMethod) -> Any:
    """`target` with another layout."""

    def target(self: Any, *given: Any, **more: Any) -> Target:
        found = base.target(self, *given, **more)
        return found._replace(flat=change(found.flat))

    return target


def with_result(base: Any, **parts: Any) -> Any:
    """`result` with other arrays: functions of the array."""

    def result(self: Any, state: Any) -> Decoded:
        found = base.result(self, state)
        return dataclasses.replace(found, **{name: change(getattr(found, name)) for name, change in parts.items()})

    return result


def without_ends(flat: grid.Flat) -> grid.Flat:
    return flat._replace(weights=np.where(flat.targets == 1, np.float32(0), flat.weights))


def without_last_row(flat: grid.Flat) -> grid.Flat:
    is_kept = flat.row < max(flat.row.max(), 1)
    return grid.Flat(*(x[is_kept] for x in flat))


def without_last_end(flat: grid.Flat) -> grid.Flat:
    """The end of the row before the final empty one is not learned."""
    is_end = (flat.targets == 1) & (flat.row == flat.row.max() - 1)
    return flat._replace(weights=np.where(is_end, np.float32(0), flat.weights))


def with_last_slot(flat: grid.Flat) -> grid.Flat:
    """The last slot is learned, also if a row was cut."""
    return flat._replace(weights=np.append(flat.weights[:-1], np.float32(1)))


def with_blank_rows(self: Any, rows: Any, spells: Any, ids: Any, *, most: int, where: str) -> Target:
    return self._laid_out(methods.spell(rows, spells, ids.ends), ids, most=most)


def without_ids(self: Any, ids: Any) -> Any:
    return Pipelined(delay=self.grid.delay, time_max=self.grid.time_max, sub_max=self.grid.sub_max)


def changing() -> Any:
    """`target` with a weight that changes from call to call."""
    count = itertools.count()

    def change(flat: grid.Flat) -> grid.Flat:
        return flat._replace(weights=flat.weights * np.float32(1 + next(count) % 7 / 8))

    return with_flat(change)


def never_cut(self: Any, *given: Any, **more: Any) -> Target:
    return PipelinedMethod.target(self, *given, **more)._replace(was_cut=False)


def scaled_loss(factor: Callable[[Any], Any]) -> Any:
    """A loss whose sum is multiplied by a function of the weights."""

    def loss(self: Any, logits: Any, targets: Any, weights: Any) -> Any:
        total, count = cross_entropy(logits, targets, weights)
        return total * factor(weights), count

    return loss


def mean_loss(self: Any, logits: Any, targets: Any, weights: Any) -> Any:
    total, count = cross_entropy(logits, targets, weights)
    return total / count, jnp.float32(1)


def loss_of_next(self: Any, logits: Any, targets: Any, weights: Any) -> Any:
    return cross_entropy(logits, (targets + 1) % logits.shape[-1], weights)


def loss_with_padding(self: Any, logits: Any, targets: Any, weights: Any) -> Any:
    return cross_entropy(logits, targets, jnp.ones_like(weights))


def loss_without_gradient(self: Any, logits: Any, targets: Any, weights: Any) -> Any:
    return cross_entropy(jax.lax.stop_gradient(logits), targets, weights)


def loss_of_confidence(self: Any, logits: Any, targets: Any, weights: Any) -> Any:
    """The divisor depends on logits."""
    total, _ = cross_entropy(logits, targets, weights)
    return total, (jax.nn.softmax(logits).max(-1) * weights).sum()


def unlikelihood(self: Any, logits: Any, targets: Any, weights: Any) -> Any:
    total, count = cross_entropy(logits, targets, weights)
    return -total, count


def ends_all(self: Any, state: Any) -> Any:
    done = Lines.done(self, state)
    return jnp.broadcast_to(done.any(), done.shape)


def ends_all_rows(self: Any, state: Any, answers: Any) -> Any:
    """The end of one example marks all examples as done."""
    new = Pipelined.advance(self, state, answers)
    return dataclasses.replace(new, done=jnp.broadcast_to(new.done.any(), new.done.shape))


def reads_all(self: Any, state: Any, answers: Any) -> Any:
    """Answers of queries that are not live end rows that have not begun."""
    new = Lines.advance(self, state, answers)
    return dataclasses.replace(new, ended=new.ended | ((answers == self.eos) & ~self.open(state)))


def first_tokens(self: Any, state: Any, answers: Any) -> Any:
    """Each example gets the tokens of the first one."""
    return Lines.advance(self, state, jnp.broadcast_to(answers[:1], answers.shape))


def after_end(self: Any, state: Any, answers: Any) -> Any:
    """Steps are counted after the end, too."""
    return dataclasses.replace(Lines.advance(self, state, answers), step=state.step + 1)


def read_some(most: int) -> Any:
    return lambda self, texts, separator: PipelinedMethod.read(self, texts[:most], separator)


def read_distinct(self: Any, texts: Any, separator: str) -> Any:
    return PipelinedMethod.read(self, [*dict.fromkeys(texts)], separator)


def read_text_of_first(self: Any, texts: Any, separator: str) -> Any:
    return texts[0] if texts else "", [*texts]


TIME_MAX, WHOLE = TRUNCATIONS.index("time_max"), TRUNCATIONS.index(None)
BROKEN_METHODS: dict[str, tuple[Piece, str]] = {
    "steps of 0": (stepping(result=with_result(Pipelined, steps=jnp.zeros_like)), "accounting"),
    "a step too many": (stepping(result=with_result(Pipelined, steps=lambda x: x + 1)), "accounting"),
    "a step too many of other rows": (uneven(result=with_result(Lines, steps=lambda x: x + 1)), "accounting"),
    "a step too few of other rows": (uneven(result=with_result(Lines, steps=lambda x: x - 1)), "accounting"),
    "one call": (stepping(calls=lambda self, decoded: 0 * np.asarray(decoded.steps) + 1), "accounting"),
    "calls of steps": (
        stepping(GridConfig(delay=3, time_max=14, sub_max=4), calls=lambda self, decoded: np.asarray(decoded.steps)),
        "accounting",
    ),
    "twice the calls": (uneven(calls=lambda self, decoded: 2 * np.asarray(decoded.steps)), "accounting"),
    "never truncated": (
        stepping(result=with_result(Pipelined, truncated=lambda x: jnp.full_like(x, WHOLE))),
        "accounting",
    ),
    "always truncated": (
        stepping(result=with_result(Pipelined, truncated=lambda x: jnp.full_like(x, TIME_MAX))),
        "whole answers",
    ),
    "other rows, never truncated": (
        uneven(result=with_result(Lines, truncated=lambda x: jnp.full_like(x, WHOLE))),
        "accounting",
    ),
    "other rows, always truncated": (
        uneven(result=with_result(Lines, truncated=lambda x: jnp.full_like(x, TIME_MAX))),
        "accounting",
    ),
    "rows that lose their last token": (
        stepping(result=with_result(Pipelined, lengths=lambda x: jnp.maximum(x - 1, 0))),
        "accounting",
    ),
    "an end of one example ends all": (uneven(done=ends_all), "examples apart"),
    "an end of one example ends all rows": (stepping(advance=ends_all_rows), "examples apart"),
    "answers of queries that are not live": (uneven(advance=reads_all), "examples apart"),
    "tokens of another example": (uneven(advance=first_tokens), "examples apart"),
    "steps after the end": (uneven(advance=after_end), "examples apart"),
    "a stop that stops all": (
        uneven(stop=lambda self, state, which: Lines.stop(self, state, jnp.broadcast_to(which.any(), which.shape))),
        "stopped examples",
    ),
    "a stop that stops none": (uneven(stop=lambda self, state, which: state), "stopped examples"),
    "a mean": (ours(loss=mean_loss), "loss is a sum"),
    "a loss scaled by its weights": (ours(loss=scaled_loss(lambda weights: weights.mean())), "loss is a sum"),
    "a loss of padding": (ours(loss=loss_with_padding), "loss ignores padding"),
    "a loss of other targets": (ours(loss=loss_of_next), "loss teaches the targets"),
    "a loss without a gradient": (ours(loss=loss_without_gradient), "loss teaches the targets"),
    "a loss of the opposite sign": (ours(loss=unlikelihood), "loss teaches the targets"),
    "a divisor of logits": (ours(loss=loss_of_confidence), "loss teaches the targets"),
    "a layout that changes": (ours(target=changing()), "layout is fixed"),
    "settings that are not learned": (
        lambda: type("Own", (Staggered,), {"learned": lambda self: {"method.rows": self.rows}})(rows=3, width=3),
        "learned settings",
    ),
    "blank rows that are laid out": (ours(target=with_blank_rows), "blank rows"),
    "cuts that are not reported": (ours(target=never_cut), "cuts are reported"),
    "a cut that is learned as an end": (ours(target=with_flat(with_last_slot)), "cuts are not ends"),
    "times that are decoded otherwise": (
        ours(target=with_flat(lambda flat: flat._replace(time=flat.time + flat.row))),
        "same visible tokens",
    ),
    "targets that are other tokens": (
        ours(target=with_flat(lambda flat: flat._replace(targets=np.where(flat.targets > 4, 9, flat.targets)))),
        "rows are kept",
    ),
    "rows beyond the second dropped": (ours(read=read_some(2)), "rows are kept"),
    "repeated rows dropped": (ours(read=read_distinct), "rows are kept"),
    "a text of the first row": (ours(read=read_text_of_first), "rows are kept"),
    "a sequential text without its last row": (
        sequential(read=lambda self, texts, separator: (texts[0], methods.split_rows(texts[0], " ; ")[:2])),
        "rows are kept",
    ),
    "an order that drops rows": (
        ours(order=lambda self, lengths: PipelinedMethod.order(self, lengths)[:2]),
        "rows are kept",
    ),
    "ends that are never learned": (ours(target=with_flat(without_ends)), "answers are learned"),
    "an end of the last row that is never learned": (ours(target=with_flat(without_last_end)), "answers are learned"),
    "a final row that is never learned": (ours(target=with_flat(without_last_row)), "answers are learned"),
    "a sequential end that is never learned": (
        sequential(target=with_flat(without_ends, SequentialMethod)),
        "answers are learned",
    ),
    "special ids of another model": (ours(strategy=without_ids), "special ids"),
    "given prefixes ignored": (ours(add_prefixes=lambda self, given: RowPrefixes()), "prefixes are kept"),
    "`max_rows` ignored": (ours(add_prefixes=lambda self, given: given._replace(most=None)), "prefixes are kept"),
    "prefixes of other rows": (
        ours(add_prefixes=lambda self, given: given._replace(prefixes=given.prefixes[::-1])),
        "prefixes are kept",
    ),
    "no separators allowed": (sequential(extra_allowed_ids=lambda self, spells: []), "limit allows separators"),
    "slots of other rows": (
        ours(rows_of=lambda self, flat, *given: (flat.row + 1).astype(np.int32)),
        "row of each slot",
    ),
    "slots of one row": (
        sequential(rows_of=lambda self, flat, *given: np.zeros(len(flat.row), np.int32)),
        "row of each slot",
    ),
    "scores of the first row alone": (ours(count_rows=lambda self, rows, most: 1), "answers"),
}


def requirement(table: Any, name: str) -> Any:
    return next(each for each in table if each.name == name)


def one_of_each_rule(table: dict[str, tuple[Piece, str]]) -> list[Any]:
    """The cases of a table; all but the first one of each rule are slow."""
    rules = [rule for _, rule in table.values()]
    slow = [rule in rules[:i] for i, rule in enumerate(rules)]
    return [pytest.param(case, marks=pytest.mark.slow if late else ()) for case, late in zip(table, slow, strict=True)]


@pytest.mark.parametrize("case", one_of_each_rule(BROKEN_METHODS))
def test_broken_method_is_refused_by_its_rule(case: str) -> None:
    make, rule = BROKEN_METHODS[case]
    with pytest.raises(UserError) as caught:
        testing.check_one(requirement(METHOD_REQUIREMENTS, rule), MethodCase(make()))
    assert str(caught.value).endswith(f"rule: {rule})") and "\n" not in str(caught.value), str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN_METHODS)
def test_broken_method_is_refused_by_the_whole_check(case: str) -> None:
    """The refusal names the broken rule, or an earlier one."""
    make, rule = BROKEN_METHODS[case]
    names = [each.name for each in METHOD_REQUIREMENTS]
    with pytest.raises(UserError, match=rf"rule: ({'|'.join(names[: names.index(rule) + 1])})\)$"):
        testing.check_method(make())


REAL_METHODS: dict[str, tuple[Method, Any]] = {
    "pipelined": (PipelinedMethod(BOUNDS), ()),
    "pipelined, a delay of 3": (PipelinedMethod(GridConfig(delay=3, time_max=16, sub_max=3)), ()),
    "pipelined, literal": (PipelinedMethod(GridConfig(delay=1, time_max=14, sub_max=4, stop="literal")), ()),
    "pipelined, unique": (PipelinedMethod(BOUNDS, unique=True), ()),
    "names": (
        methods.NamedRows(GridConfig(delay=0, time_max=8, sub_max=3, row_names=("red", "old"))),
        [["red apples", "old maps"], ["red lamps bells", "old"]],
    ),
    "names, a delay of 1": (
        methods.NamedRows(GridConfig(delay=1, time_max=8, sub_max=3, row_names=("red", "old"))),
        [["red apples", "old maps"], ["red lamps", "old bells roses"]],
    ),
    "sequential": (SequentialMethod(24, " ; ", 1), ()),
    "beams": (Beams(20, " ; ", 1, 3, 1.0), ()),
    "uneven": (Uneven(), ()),
    "staggered": (Staggered(rows=3, width=5), ()),
    "branching": (Branching(), ()),
}


REPEATED = "pipelined, a delay of 3", "pipelined, unique", "names, a delay of 1"  # other cases have the same methods


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in REPEATED else ()) for case in REAL_METHODS]
)
def test_real_method_keeps_the_rules(case: str) -> None:
    """Checks all rules except "answers", which takes longer."""
    method, targets = REAL_METHODS[case]
    checked = MethodCase(method, targets=targets)
    for each in METHOD_REQUIREMENTS[:-1]:
        testing.check_one(each, checked)


@pytest.mark.slow
def test_scores_are_compared_if_a_method_has_them() -> None:
    without = type("Own", (PipelinedMethod,), {"name": "own", "can": PipelinedMethod.can - {"score"}})
    for method, scores in ((PipelinedMethod(BOUNDS), True), (without(BOUNDS), False)):
        assert MethodCase(method).generator.config.decode.scores == scores


@dataclasses.dataclass(frozen=True)
class FewValues(Staggered):
    """A method with settings that limit answers, and that accept few values."""

    most: int = 4
    times: int = 8

    def __post_init__(self) -> None:
        if self.times % self.most:
            raise ValueError("times must be a multiple of most")

    def learned(self) -> dict[str, object]:
        limits = "method.most", "method.times"
        return {key: value for key, value in super().learned().items() if key not in limits}


def test_values_that_a_method_refuses_are_not_tried() -> None:
    testing.check_one(requirement(METHOD_REQUIREMENTS, "learned settings"), MethodCase(FewValues(rows=3, width=3)))


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL_METHODS)
def test_real_method_passes(case: str) -> None:
    method, targets = REAL_METHODS[case]
    if method.name in METHODS:  # a custom method has another name
        method = type("Ours", (type(method),), {"name": "ours"})(**vars(method))
    assert "answers agree with recomputation" in testing.check_method(method, targets=targets)


def example(page: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of the first block of Python on a page."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text(encoding="utf-8")
    module = types.ModuleType(page.removesuffix(".md"))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # required by dataclasses
    exec(text.split("```python\n", 1)[1].split("```", 1)[0], vars(module))
    return getattr(module, name)


@pytest.mark.slow
def test_examples_of_the_pages_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    method = example("methods.md", "LastFirst", monkeypatch)
    assert "answers agree with recomputation" in testing.check_method(method(rows=3, times=12))
    linear = example("backbones.md", "LinearConfig", monkeypatch)
    assert "answers agree with recomputation" in testing.check_backbone(linear(**vars(testing.TOY)))


# Backbones.


def clipped(name: str) -> Any:
    """A decoder in which positions beyond 64 are 64."""

    def bias(self: Any, mask: Any, query: Any, key: Any) -> Any:
        return t5.Decoder.bias(self, mask, jnp.minimum(query, 64), jnp.minimum(key, 64))

    return type(name, (t5.Decoder,), {"bias": bias})


class WrongStepPositions(t5.Decoder):
    """Positions wrap at 64, but only in steps."""

    def step(self, x: Any, mask: Any, position: Any, key_position: Any, *given: Any) -> Any:
        return super().step(x, mask, position % 64, key_position % 64, *given)


class OneStart(t5.Decoder):
    """All examples write to the slots of the first example."""

    def step(self, x: Any, mask: Any, position: Any, key_position: Any, memory: Any, caches: Any, start: Any) -> Any:
        return super().step(x, mask, position, key_position, memory, caches, start[:1])


class Blind(t5.Decoder):
    """A slot does not see itself."""

    def __call__(self, x: Any, mask: Any, *given: Any) -> Any:
        return super().__call__(0 * x + x.mean(), mask, *given)


class AllSources(t5.T5):
    """Slots see the sources of other targets."""

    def hidden(self, *given: Any, deterministic: bool = True) -> Any:
        return super().hidden(*given[:5], deterministic=deterministic)


class FixedEncoder(t5.Encoder):
    """The encoder is not trained."""

    def __call__(self, *given: Any) -> Any:
        return jax.lax.stop_gradient(super().__call__(*given))


class HalfFeedForward(layers.FeedForward):
    """Half of the gradient is lost."""

    def __call__(self, x: Any, deterministic: bool) -> Any:
        found = super().__call__(x, deterministic)
        return x + 0.5 * (found - x) + 0.5 * jax.lax.stop_gradient(found - x)


class FixedHead(t5.T5):
    """The head is not trained."""

    def logits(self, hidden: Any) -> Any:
        return super().logits(jax.lax.stop_gradient(hidden))


class OtherInBfloat16(t5.Encoder):
    """In bfloat16 the encoder does nothing."""

    def __call__(self, x: Any, *given: Any) -> Any:
        found = super().__call__(x, *given)
        return x if self.dtype == jnp.bfloat16 else found


class OtherWithRemat(t5.Decoder):
    """The output differs with remat."""

    def run(self, *given: Any, deterministic: bool) -> Any:
        found = super().run(*given, deterministic=deterministic)
        return found if self.remat == "none" else 1.1 * found


class OtherWithDots(t5.Decoder):
    """With one kind of remat a part has no gradient."""

    def run(self, *given: Any, deterministic: bool) -> Any:
        found = super().run(*given, deterministic=deterministic)
        return 0.5 * found + 0.5 * jax.lax.stop_gradient(found) if self.remat == "dots" else found


class FirstSixteen(t5.Encoder):
    """Tokens after the sixteenth are hidden."""

    def __call__(self, x: Any, mask: Any, deterministic: bool) -> Any:
        found = super().__call__(x, mask & (jnp.arange(x.shape[1]) < 16), deterministic)
        return jnp.where((jnp.arange(x.shape[1]) < 16)[:, None], found, 0.0)


class OtherLongMemory(t5.Decoder):
    """In steps, the memory of a source of more than 16 tokens differs."""

    def memorize(self, encoded: Any, mask: Any) -> Any:
        found = super().memorize(encoded, mask)
        return (
            found
            if encoded.shape[1] <= 16
            else dataclasses.replace(found, mask=mask & (jnp.arange(encoded.shape[1]) < 16))
        )


class Batched(t5.Encoder):
    """A source sees the mean of its batch."""

    def __call__(self, *given: Any) -> Any:
        found = super().__call__(*given)
        return found + 0.1 * found.mean(axis=0, keepdims=True)


class NoDropout(t5.T5):
    """Dropout is ignored."""

    def hidden(self, *given: Any, deterministic: bool = True) -> Any:
        return super().hidden(*given, deterministic=True)


class AlwaysDropout(t5.T5):
    """The rate of dropout changes the results without dropout."""

    def logits(self, hidden: Any) -> Any:
        return super().logits(hidden * (1 - self.dropout))


class OtherDropoutWithDots(t5.Decoder):
    """With one kind of remat the masks of dropout differ."""

    def run(self, x: Any, *given: Any, deterministic: bool) -> Any:
        if self.remat == "dots":
            self.drop(x, deterministic=deterministic)  # later calls draw other seeds
        return super().run(x, *given, deterministic=deterministic)


class CausalSteps(t5.Decoder):
    """A query of a step does not see the later queries of the step, though the mask says so."""

    def step(self, x: Any, mask: Any, position: Any, key_position: Any, memory: Any, caches: Any, start: Any) -> Any:
        place = start[:, None, None] + jnp.arange(mask.shape[1])[:, None]
        return super().step(
            x, mask & (jnp.arange(mask.shape[2]) < place), position, key_position, memory, caches, start
        )


class Rounded(t5.Decoder):
    """Steps keep keys and values in another precision."""

    def step(self, *given: Any) -> Any:
        found, caches = super().step(*given)
        return found, jax.tree.map(lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype), caches)


def backbone(decoder: Any = t5.Decoder, encoder: Any = t5.Encoder, base: Any = t5.T5, **parts: Any) -> Piece:
    """A T5 with other stacks, another module and other parts of its config."""
    module = type("Module", (base,), {"decoder_stack": decoder, "encoder_stack": encoder})
    parts = {"module": lambda self, **options: module(self, **options), "__hash__": T5Config.__hash__, **parts}
    kind = type("Own", (T5Config,), parts)
    return lambda: kind(**vars(testing.TOY))


def in_blocks(change: Callable[[Slots], Slots]) -> Piece:
    """A T5 whose decoder changes the coordinates of its slots in attention in blocks."""

    def seen(self: Any, queries: Slots, keys: Slots, distances: Any = None) -> Any:
        if queries.row is not None:  # of self-attention
            queries, keys = change(queries), change(keys)
        return t5.Decoder.seen(self, queries, keys, distances)

    decoder = type("Decoder", (t5.Decoder,), {"seen": seen})
    return backbone(decoder, head_width=lambda self: self.d_kv)


def without_fact(name: str) -> Any:
    return lambda self: {key: x for key, x in T5Config.facts(self).items() if key != name}


def read_otherwise(**changes: Any) -> Any:
    read: Any = vars(T5Config)["read_facts"].__func__
    return classmethod(lambda cls, facts: read(cls, facts) | changes)


def with_layer(base: Any, **parts: Any) -> Any:
    return type("Stack", (base,), {"layer": type("Layer", (base.layer,), parts)})


BROKEN_BACKBONES: dict[str, tuple[Piece, str]] = {
    "a fact that is not written": (backbone(facts=without_fact("layer_norm_epsilon")), "kept facts"),
    "a size that is not written": (backbone(facts=without_fact("relative_attention_max_distance")), "kept facts"),
    "a fact that is not read": (backbone(read_facts=read_otherwise(feed_forward="relu")), "kept facts"),
    "a head that is always tied": (backbone(fitted=lambda self, tensors, weights: self), "kept facts"),
    "positions that end at 64": (backbone(clipped("Clipped")), "differences of positions"),
    "positions that wrap at 64 in steps": (backbone(WrongStepPositions), "steps"),
    "one start for all examples": (backbone(OneStart), "steps"),
    "queries of a step that do not see each other": (backbone(CausalSteps), "steps"),
    "rounded keys": (backbone(Rounded), "steps"),
    "sources of more than 16 tokens in steps": (backbone(OtherLongMemory), "steps"),
    "sources of more than 16 tokens": (backbone(encoder=FirstSixteen), "whole sources"),
    "sources that see each other": (backbone(encoder=Batched), "whole sources"),
    "a slot that does not see itself": (backbone(Blind), "visible slots"),
    "packed targets that see each other's source": (backbone(base=AllSources), "packing"),
    "an encoder without a gradient": (backbone(encoder=FixedEncoder), "gradient"),
    "half of a gradient": (backbone(with_layer(t5.Decoder, feed_forward_class=HalfFeedForward)), "gradient"),
    "a head without a gradient": (backbone(base=FixedHead), "gradient"),
    "another function in bfloat16": (backbone(encoder=OtherInBfloat16), "bfloat16"),
    "another function with remat": (backbone(OtherWithRemat), "remat"),
    "another gradient with remat": (backbone(OtherWithDots), "remat"),
    "dropout that is ignored": (backbone(base=NoDropout), "dropout"),
    "dropout that is never off": (backbone(base=AlwaysDropout), "dropout"),
    "other dropout with remat": (backbone(OtherDropoutWithDots), "dropout"),
    "blocks without rows and times": (
        in_blocks(lambda slots: dataclasses.replace(slots, row=None, time=None)),
        "attention in blocks",
    ),
    "blocks without groups": (in_blocks(lambda slots: dataclasses.replace(slots, group=None)), "attention in blocks"),
    "blocks in which positions do not matter": (
        in_blocks(lambda slots: dataclasses.replace(slots, position=0 * slots.position)),
        "attention in blocks",
    ),
}


@pytest.mark.parametrize("case", one_of_each_rule(BROKEN_BACKBONES))
def test_broken_backbone_is_refused_by_its_rule(case: str) -> None:
    make, rule = BROKEN_BACKBONES[case]
    with pytest.raises(UserError) as caught:
        testing.check_one(requirement(BACKBONE_REQUIREMENTS, rule), BackboneCase(make()))
    assert str(caught.value).endswith(f"rule: {rule})") and "\n" not in str(caught.value), str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN_BACKBONES)
def test_broken_backbone_is_refused_by_the_whole_check(case: str) -> None:
    """The refusal names the broken rule, or an earlier one."""
    make, rule = BROKEN_BACKBONES[case]
    names = [each.name for each in BACKBONE_REQUIREMENTS]
    with pytest.raises(UserError, match=rf"rule: ({'|'.join(names[: names.index(rule) + 1])})\)$"):
        testing.check_backbone(make())
