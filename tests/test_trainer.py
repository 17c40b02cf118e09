"""The training step: loss, gradient and update equal independent ones, on one device and on many."""

import dataclasses
import math
import re
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.apps import demo
from pipejax.config import TrainConfig
from pipejax.data.batches import TrainingBatches, abstract_batch, choose_shapes, collate, fixed_batches, pack_size
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.data.shapes import bucket, deal
from pipejax.methods import losses
from pipejax.model import lora, parameters, sharding, t5
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.training import optimizer
from pipejax.training.step import Trainer, batch_loss, split_into_parts, train_step
from support import oracle
from support.compiled_once import shared_trainer
from support.tiny import DEEP, MESHES, MODEL, change
from support.tiny import STEP as CONFIG
from support.trees import close, same_bits


@pytest.fixture(scope="module")
def batches(tokenizer):
    return TrainingBatches(demo.examples("train"), tokenizer, CONFIG, MODEL)


def train(config, arrays, *, steps=3, state=None):
    """The final state and the metrics of each step, from a new or a given state, which is consumed."""
    trainer, seen = shared_trainer(config), []
    state = state or trainer.fresh()
    for step in range(1, steps + 1):
        placed = sharding.put_batch(arrays[step - 1], trainer.mesh)
        state, values = trainer.step(state, placed, trainer.dropout_key(step))
        seen.append(jax.device_get(values))
    return jax.device_get(state), seen


def leaf(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return np.asarray(tree)


# The loss.


@pytest.mark.parametrize(
    "delay, pack",
    [
        pytest.param(delay, pack, marks=pytest.mark.slow if (i + j) % 3 else pytest.mark.long)
        for i, delay in enumerate((0, 1, 2, 4))
        for j, pack in enumerate((7, 2, 1))
    ],
)
def test_pipelined_loss_is_the_definition(tokenizer, delay, pack):
    config = change(CONFIG, grid={"delay": delay})
    params = oracle.random_params(MODEL, np.random.default_rng(delay))
    examples = demo.examples("train")[: 13 if delay else 14]
    if delay:  # otherwise the number of rows is given, and no answer is empty
        examples.append(Example("none", "the baker smiled .", ()))
    encoded = [encode_example(e, tokenizer, config, MODEL) for e in examples]
    total, count = jax.jit(lambda p: batch_loss(t5.T5(MODEL), p, collate(encoded, pack).arrays, None))(params)
    expected, tokens = 0.0, 0
    for example in examples:
        rows = [tokenizer.encode(row) for row in example.targets]
        n = sum(len(row) + 1 for row in rows) + (delay > 0)
        given = params, MODEL, [*tokenizer.encode(example.source), 1], rows, delay
        mean = oracle.teacher_forced_loss(*given, empty_row=delay > 0)
        expected, tokens = expected + n * mean, tokens + n
    assert int(count) == tokens
    assert abs(float(total) - expected) < 1e-5 * expected


@pytest.mark.slow
def test_a_loss_in_parts_is_the_loss(monkeypatch):
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(3, 24, 8)).astype(np.float32), rng.normal(size=(8, 50)).astype(np.float32)
    targets, weights = rng.integers(0, 50, (3, 24)), rng.integers(0, 2, (3, 24)).astype(np.float32)

    def loss(hidden, table):
        return losses.in_parts(losses.cross_entropy, lambda h: h @ table, hidden, targets, weights, vocabulary=50)

    whole = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, table)
    monkeypatch.setattr(losses, "LOGITS", 3 * 50 * 5)  # five slots at once do not divide 24: six parts of four
    parts = jax.make_jaxpr(loss)(hidden, table)
    assert "length=6" in str(parts)
    close(jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, table), whole, rtol=2e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat, dropout", [("dots", 0.0), *(pytest.param("layers", x, marks=pytest.mark.long) for x in (0.0, 0.3))]
)
def test_rematerialisation_changes_no_gradient(batches, remat, dropout):
    params = oracle.random_params(DEEP, np.random.default_rng(3))
    key = jax.random.key(0) if dropout else None

    def gradient(**options):
        model = t5.T5(DEEP, dropout=dropout, **options)
        return jax.jit(jax.value_and_grad(lambda p: batch_loss(model, p, batches[0].arrays, key)[0]))(params)

    close(gradient(remat=remat), gradient(), rtol=1e-4, atol=1e-4)


# Batches.


def test_packed_rows_contain_every_example_with_little_padding(batches):
    for number in range(4):
        arrays = batches[number].arrays
        assert pack_size(CONFIG.train) == 3 and arrays["inputs"].shape[0] == 8 and arrays["source"].shape[0] == 24
        for row in range(8):
            real = arrays["example"][row, : arrays["slots"][row]]
            assert set(real) == {0, 1, 2} and (np.diff(real) >= 0).all()
            assert not arrays["weights"][row, arrays["slots"][row] :].any()
        used, width = arrays["slots"].sum(), arrays["inputs"].shape[1]
        assert used <= 8 * width < 1.2 * used + 8 * 16  # a row is rounded up to a multiple of 16


def test_runs_have_even_lengths():
    lengths = [9, 1, 1, 8, 2, 7, 3, 5]
    order = deal(lengths, 2)
    assert sorted(order) == list(range(8))
    assert [sum(lengths[i] for i in order[r : r + 2]) for r in (0, 2, 4, 6)] == [10, 9, 9, 8]


def test_each_example_goes_to_the_shortest_run():
    """The simplest implementation is the reference: it takes the first of equal runs."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 7):
        lengths = rng.integers(0, 6, 6 * size).tolist()
        runs: list[list[int]] = [[] for _ in range(6)]
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            free = [run for run in runs if len(run) < size]
            min(free, key=lambda run: sum(lengths[j] for j in run)).append(i)
        assert deal(lengths, size) == [i for run in runs for i in run]


@pytest.mark.parametrize("size, pack", [(24, 3), (32, 4), (16, 2), (8, 1), (12, 3), (10, 1), (1, 1), (64, 4)])
def test_pack_follows_the_batch_size(size, pack):
    assert pack_size(TrainConfig(batch_size=size)) == pack
    assert pack_size(TrainConfig(batch_size=size, pack=5)) == 5


def test_fixed_batches_contain_each_example_once(tokenizer):
    encoded = [encode_example(e, tokenizer, CONFIG, MODEL) for e in demo.examples("dev")[:31]]
    shapes = choose_shapes(demo.examples("dev"), tokenizer, CONFIG, MODEL)
    batches = list(fixed_batches(encoded, CONFIG.train, shapes))
    assert sum(b.arrays["weights"].sum() for b in batches) == sum(e.target.weights.sum() for e in encoded)


def test_fewer_steps_have_fewer_shapes(tokenizer):
    """The shapes of a config follow from the lengths of its examples."""
    examples = demo.examples("train")[:406]
    few, many = (
        choose_shapes(examples, tokenizer, change(CONFIG, train={"steps": steps, "shapes": 22}), MODEL).pairs
        for steps in (200, 10**6)
    )
    assert len(few) <= 4 < len(many)


def test_padded_lengths_are_few_and_tight():
    sizes = sorted({bucket(n) for n in range(1, 2049)})
    assert sizes == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    assert all(n <= bucket(n) < max(17, 2 * n) for n in range(1, 2049))


# The step.


@pytest.mark.slow
def test_accumulation_equals_the_full_batch(batches):
    """Lengths are uneven, so the mean of the parts' means would be another loss."""
    arrays = [batches[0].arrays] * 3
    counts = split_into_parts(arrays[0], 4)["weights"].sum((1, 2))
    assert len(set(counts)) > 1 and counts.sum() == arrays[0]["weights"].sum()
    whole, losses_whole = train(CONFIG, arrays)
    for accumulate in (2, 8):
        parts, losses_parts = train(change(CONFIG, train={"accumulate": accumulate}), arrays)
        close(losses_parts, losses_whole, rtol=2e-6)
        close(parts.params, whole.params, atol=1e-6)


def test_parts_keep_rows_with_their_sources(batches):
    arrays = batches[0].arrays
    parts = split_into_parts(arrays, 4)
    seen = set()
    for part in range(4):
        for row in range(2):
            original = next(r for r in range(8) if np.array_equal(parts["inputs"][part, row], arrays["inputs"][r]))
            np.testing.assert_array_equal(
                parts["source"][part, 3 * row : 3 * row + 3], arrays["source"][3 * original : 3 * original + 3]
            )
            seen.add(original)
    assert len(seen) == 8


@pytest.mark.slow
def test_program_compiled_ahead_gives_equal_results(batches):
    arrays = batches[0].arrays
    trainer, other = Trainer(CONFIG), Trainer(CONFIG)
    trainer.prepare([(arrays["source"].shape[1], arrays["inputs"].shape[1])])
    same_bits(*(each.step(each.fresh(), arrays, each.dropout_key(1)) for each in (trainer, other)))
    assert len(trainer._programs) == 1 and trainer.is_ready({name: x.shape for name, x in arrays.items()})
    trainer.close()


@pytest.mark.slow
def test_program_that_failed_ahead_is_compiled_again(batches, monkeypatch):
    """The memory was short at that moment, for example; no command waits for programs that are compiled ahead."""
    arrays, compiled, unneeded = batches[0].arrays, Trainer._compile_ahead, []

    def fails_beside(self, batch):
        if threading.current_thread() is not threading.main_thread():
            unneeded.extend(cli._unneeded)
            raise MemoryError
        return compiled(self, batch)

    monkeypatch.setattr(Trainer, "_compile_ahead", fails_beside)
    trainer = Trainer(change(CONFIG, mesh={"data": 1}))
    trainer.prepare([(arrays["source"].shape[1], arrays["inputs"].shape[1])])
    _, metrics = trainer.step(trainer.fresh(), arrays, trainer.dropout_key(1))
    assert metrics["good"] and trainer.is_ready({name: x.shape for name, x in arrays.items()})
    trainer.close()
    assert len(unneeded) <= 1 and not cli._unneeded


@pytest.mark.parametrize("dtype, precise", [("float32", True), pytest.param("bfloat16", False, marks=pytest.mark.slow)])
def test_float32_is_not_rounded_in_products(dtype, precise):
    trainer = Trainer(change(CONFIG, train={"dtype": dtype}))
    text = trainer.lower(abstract_batch(CONFIG.train, (16, 16))).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all(("HIGHEST" in line) == precise for line in products)


@pytest.mark.parametrize(
    "name, poison",
    [
        ("adamw", float("nan")),
        pytest.param("adamw", float("inf"), marks=pytest.mark.slow),
        pytest.param("adafactor", float("nan"), marks=pytest.mark.slow),
        pytest.param("adafactor", float("inf"), marks=pytest.mark.slow),
    ],
)
def test_a_poisoned_batch_changes_no_bit(batches, poison, name):
    config = change(CONFIG, train={"optimizer": name, "accumulate": 2})
    trainer, arrays = shared_trainer(config), dict(batches[0].arrays)
    state = trainer.fresh()
    state, values = trainer.step(state, arrays, trainer.dropout_key(1))
    assert values["good"]
    before = jax.device_get(state)
    weights = arrays["weights"].copy()
    weights[5, 0] = poison
    state, values = trainer.step(state, arrays | {"weights": weights}, trainer.dropout_key(2))
    assert not values["good"]
    same_bits(before, jax.device_get(state))
    state, values = trainer.step(state, arrays, trainer.dropout_key(3))
    assert values["good"] and not np.array_equal(
        state.params["shared"]["embedding"], before.params["shared"]["embedding"]
    )


@pytest.mark.slow
def test_without_a_branch_the_update_is_the_same(batches):
    """GPUs compute it without a branch."""
    trainer, arrays = shared_trainer(CONFIG), dict(batches[0].arrays)
    with_branch, without = (
        jax.jit(partial(train_step, trainer.model, trainer.optimizer, branch=branch)) for branch in (True, False)
    )
    state, key = trainer.fresh(), trainer.dropout_key(1)
    found, expected = without(state, arrays, key)[0], with_branch(state, arrays, key)[0]
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
    weights = arrays["weights"].copy()
    weights[5, 0] = np.nan
    same_bits(jax.device_get(state), jax.device_get(without(state, arrays | {"weights": weights}, key)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_decay_is_the_rate_times_the_weight(name):
    config = TrainConfig(optimizer=name, weight_decay=0.1, learning_rate=0.01, warmup_steps=1)
    params = {"a": {"kernel": jnp.full((4, 4), 2.0)}, "norm": {"scale": jnp.ones(4)}}
    update = optimizer.make_optimizer(config)
    zero = jax.tree.map(jnp.zeros_like, params)
    changes, state = update.update(zero, update.init(params), params)
    np.testing.assert_allclose(changes["a"]["kernel"], -0.01 * 0.1 * 2.0, rtol=1e-4)
    assert not changes["norm"]["scale"].any() and optimizer.updates_made(state) == 1


@pytest.mark.slow
def test_a_frozen_encoder_keeps_its_bits_and_has_no_moments(batches):
    config = change(CONFIG, train={"freeze": "encoder"})
    state = shared_trainer(config).fresh()
    born = jax.device_get(state)
    state, _ = train(config, [batches[0].arrays] * 3, state=state)
    for name in ("encoder", "shared"):
        same_bits(born.params[name], state.params[name])
    decoders = map(jax.tree.leaves, (born.params["decoder"], state.params["decoder"]))
    assert all((a != b).any() for a, b in zip(*decoders, strict=True))
    trained = sum(x.size for x in jax.tree.leaves(state.params["decoder"]))
    assert sum(x.size for x in jax.tree.leaves(state.optimizer) if x.ndim) == 2 * trained


@pytest.mark.slow
def test_one_step_of_adamw_by_hand(batches):
    """For update 1: clip to norm 1, correct both moments, so every weight changes by the rate against its sign."""
    config = change(CONFIG, train={"weight_decay": 0.1, "warmup_steps": 1})
    state = shared_trainer(config).fresh()
    params = jax.device_get(state.params)
    mean = jax.jit(jax.grad(lambda p: jnp.divide(*batch_loss(t5.T5(MODEL), p, batches[0].arrays, None))))
    gradient = mean(params)
    norm = math.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))
    state, seen = train(config, [batches[0].arrays], steps=1, state=state)
    assert abs(seen[0]["grad_norm"] - norm) < 1e-4 * norm
    scale = min(1.0, 1.0 / norm)
    for keys, old in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = sharding.path_of(keys)
        g = leaf(gradient, path) * scale
        decay = 0.0 if path.endswith(("norm/scale", "relative_bias/embedding")) else 0.1
        expected = old - 1e-3 * (g / (np.abs(g) + 1e-8) + decay * old)
        np.testing.assert_allclose(leaf(state.params, path), expected, atol=2e-5, err_msg=path)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_equal_their_definitions(schedule):
    rate = optimizer.learning_rate(TrainConfig(steps=110, warmup_steps=10, learning_rate=2.0, schedule=schedule))
    assert [round(float(rate(step - 1)), 6) for step in (1, 5, 10)] == [0.2, 1.0, 2.0]
    halfway, late = {"constant": (2, 2), "linear": (1, 0.5), "cosine": (1, 1 + math.cos(0.75 * math.pi))}[schedule]
    np.testing.assert_allclose([rate(60), rate(85)], [halfway, late], rtol=1e-5)


def test_a_warmup_may_be_a_share_of_the_steps():
    """A few remaining steps, and another count of warm-up steps, are tested too."""
    for share, steps, rising in ((0.06, 500, 30), (0.1, 7, 1), (0.5, 3, 2), (0.001, 100, 1)):
        own = TrainConfig(steps=steps, warmup_share=share, warmup_steps=77, learning_rate=1.0)
        rate = optimizer.learning_rate(own)
        assert float(rate(rising - 1)) == 1.0 and float(rate(0)) == pytest.approx(1 / rising)
    assert optimizer.warmup(TrainConfig(warmup_steps=77)) == 77


# Initial weights.


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [pytest.param(MESHES[0], marks=pytest.mark.slow), MESHES[3]])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        pytest.param(
            {"feed_forward": "gated-gelu", "tied_head": False, "scale_head": False, "vocab_size": 65},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_drawn_one_by_one_equal_weights_drawn_together(mesh, sizes):
    model, key = dataclasses.replace(DEEP, **sizes), jax.random.key(3)
    trainer = shared_trainer(change(CONFIG, mesh=mesh))
    places = sharding.param_shardings(model, jax.eval_shape(model.init_params, key), trainer.mesh)
    expected = jax.jit(model.init_params, out_shardings=places)(key)
    found = parameters.initial(model, key, trainer.mesh)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    same_bits(found, expected)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, found, expected))


# Many devices.


@pytest.mark.parametrize(
    "options, meshes",
    [
        pytest.param({"dropout": 0.1}, [MESHES[0], MESHES[3]], marks=pytest.mark.slow),  # all axes together
        pytest.param({"dropout": 0.1}, MESHES, marks=pytest.mark.long),
        pytest.param(
            {"dropout": 0.1, "remat": "layers", "batch_size": 48, "accumulate": 2},
            [MESHES[0], MESHES[3]],
            marks=pytest.mark.long,
        ),
        pytest.param({"optimizer": "adafactor", "freeze": "encoder"}, [MESHES[0], MESHES[3]], marks=pytest.mark.long),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else str(len(x)),
)
def test_meshes_agree(tokenizer, options, meshes, capfd):
    config = change(CONFIG, train=options)
    arrays = [TrainingBatches(demo.examples("train"), tokenizer, config, MODEL)[0].arrays] * 3
    births, seen = [], []
    for mesh in meshes:
        chosen = change(config, mesh=mesh)
        state = shared_trainer(chosen).fresh()
        births.append(jax.device_get(state.params))
        seen.append([float(values["loss"]) for values in train(chosen, arrays, state=state)[1]])
    for other in births[1:]:
        same_bits(births[0], other)
    for losses_ in seen[1:]:
        np.testing.assert_allclose(losses_, seen[0], atol=2e-6)
    assert len(set(seen[0])) == 3
    assert "rematerialization" not in capfd.readouterr().err  # XLA would copy a whole table at every step


def test_every_parameter_matches_exactly_one_rule():
    gated = dataclasses.replace(MODEL, feed_forward="gated-gelu", tied_head=False)
    for model in (MODEL, gated):
        shapes = jax.eval_shape(lambda key, model=model: lora.add(model.init_params(key), 2, key), jax.random.key(0))
        for keys, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]:
            path = sharding.path_of(keys)
            assert sum(bool(re.fullmatch(rule, path)) for rule, _ in model.sharding) == 1, path


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"train": {"accumulate": 5}}, r"train\.batch_size: found 24; expected a multiple of 5"),
        ({"train": {"accumulate": 6}}, r"train\.pack: found 3 \(chosen .*\); expected a divisor of 4,"),
        ({"train": {"pack": 5}}, r"train\.pack: found 5; expected a divisor of 24"),
        ({"mesh": {"data": 4, "fsdp": 2}, "train": {"pack": 2}}, r"train\.pack: found 2; .* of 3, .* such as 3"),
    ],
)
def test_batch_sizes_that_do_not_divide_are_refused(sections, message):
    with pytest.raises(UserError, match=message):
        Trainer(change(CONFIG, **sections))


# Costs.


def test_training_operations_equal_xlas_count_of_matrices():
    """Compared with XLA's count of the forward pass of one example without padding; attention is counted by hand."""
    source, slots = 64, 32
    model = dataclasses.replace(MODEL, d_model=256, d_kv=64, d_ff=512)
    params = oracle.random_params(model, np.random.default_rng(0))
    flat = np.zeros((1, slots), np.int32)
    seen = np.ones((1, source), np.int32), np.ones((1, source), bool), flat, np.ones((1, slots, slots), bool)
    forward = jax.jit(lambda p: t5.T5(model).apply({"params": p}, *seen, flat))
    counted = forward.lower(params).compile().cost_analysis()["flops"]
    ours = model.training_flops(np.asarray([[source, slots]])) / 3
    assert 0.97 * counted < ours <= counted  # XLA counts norms and softmax, too


def test_training_operations_add_up_over_examples():
    lengths = np.asarray([[100, 20], [300, 5]])
    both = MODEL.training_flops(lengths)
    assert both == MODEL.training_flops(lengths[:1]) + MODEL.training_flops(lengths[1:])


def test_an_example_without_rows_still_teaches_to_stop(tokenizer):
    encoded = encode_example(Example("none", "the baker smiled .", ()), tokenizer, CONFIG, MODEL)
    assert collate([encoded]).arrays["weights"].sum() == 1


def test_rows_without_tokens_are_dropped_for_both_objectives(tokenizer):
    """Between separators, a row without tokens leaves nothing either."""
    for objective in ("pipelined", "sequential"):
        config = change(CONFIG, train={"method": objective})
        spoilt, clean = (
            encode_example(Example("x", "the baker smiled .", rows), tokenizer, config, MODEL).target
            for rows in (("honey", "</s>", "old </s> bread", " "), ("honey", "old bread"))
        )
        for one, other in zip(spoilt, clean, strict=True):
            np.testing.assert_array_equal(one, other)
