"""Low-rank factors: against the weights that they stand for, in the step and in runs."""

import dataclasses

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from pipejax import checkpoint
from pipejax.apps import demo
from pipejax.data.batches import TrainingBatches
from pipejax.inference.backends import XLA
from pipejax.model import lora, sharding, t5
from pipejax.system.errors import UserError
from pipejax.training import optimizer
from pipejax.training.loop import fit
from pipejax.training.step import Trainer, batch_loss
from support.tiny import DEEP, MESHES, change, metrics, untimed
from support.tiny import RUN_ON_ONE as CONFIG
from support.tiny import STEP as STEP_CONFIG
from support.trees import close, same_bits

RANK = 2
pytestmark = pytest.mark.usefixtures("compiled_once")
PER_LAYER = {"encoder": 4 + 2, "decoder": 8 + 2}  # the matrices of attention and of a feed-forward layer with relu


@pytest.fixture(scope="module")
def arrays():
    return TrainingBatches(demo.examples("train"), demo.DemoTask().tokenizer(), STEP_CONFIG, DEEP)[0].arrays


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint without factors."""
    directory = tmp_path_factory.mktemp("whole") / "checkpoint"
    checkpoint.save_params(directory, CONFIG, CONFIG.model.init_params(jax.random.key(3)))
    return directory


def leaves(tree):
    return {sharding.path_of(keys): np.asarray(x) for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def random_factors(seed=0):
    """Parameters whose factors B are not zero."""
    params = lora.add(DEEP.init_params(jax.random.key(seed)), RANK, jax.random.key(1))
    rng = np.random.default_rng(seed)

    def fill(keys, x):
        drawn = rng.normal(size=x.shape).astype(np.float32) * 0.1
        return drawn if sharding.path_of(keys).endswith("/lora_b") else x

    return jax.tree_util.tree_map_with_path(fill, params)


def by_hand(params):
    """W + A B in NumPy, for each W with factors."""
    flat, merged = leaves(params), {}
    for path, x in flat.items():
        stem = path.rpartition("/")[0]
        if path.endswith("/kernel") and f"{stem}/lora_a" in flat:
            x = x + flat[f"{stem}/lora_a"] @ flat[f"{stem}/lora_b"]
        if "lora_" not in path:
            merged[path] = x
    return merged


@pytest.mark.slow
def test_every_matrix_of_the_layers_gets_factors_that_change_nothing(arrays):
    plain = DEEP.init_params(jax.random.key(0))
    params = lora.add(plain, RANK, jax.random.key(1))
    added = {path: x for path, x in leaves(params).items() if path not in leaves(plain)}
    matrices = DEEP.num_layers * PER_LAYER["encoder"] + DEEP.num_decoder_layers * PER_LAYER["decoder"]
    assert len(added) == 2 * matrices
    firsts = [x for path, x in added.items() if path.endswith("lora_a")]
    assert len({x.tobytes() for x in firsts}) == matrices and all(x.shape[1] == RANK and x.any() for x in firsts)
    loss = jax.jit(lambda params: batch_loss(t5.T5(DEEP), params, arrays, None))
    same_bits(loss(params), loss(plain))
    same_bits(lora.merge_factors(params), plain)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layers"])
def test_loss_and_gradient_equal_merged_weights(arrays, remat):
    params = random_factors()
    model, merged = t5.T5(DEEP, remat=remat), lora.merge_factors(params)
    assert leaves(merged).keys() == by_hand(params).keys()
    for path, x in by_hand(params).items():
        np.testing.assert_allclose(leaves(merged)[path], x, atol=1e-6, err_msg=path)

    loss = jax.jit(jax.value_and_grad(lambda params: batch_loss(model, params, arrays, None)[0]))
    value, gradient = loss(params)
    expected, whole = loss(merged)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    own, whole, flat = leaves(gradient), leaves(whole), leaves(params)
    for path in (path for path in own if path.endswith("/lora_a")):
        stem = path.removesuffix("/lora_a")
        kernel, a, b = whole[f"{stem}/kernel"], flat[f"{stem}/lora_a"], flat[f"{stem}/lora_b"]
        np.testing.assert_allclose(own[path], kernel @ b.T, rtol=1e-3, atol=2e-4, err_msg=path)
        np.testing.assert_allclose(own[f"{stem}/lora_b"], a.T @ kernel, rtol=1e-3, atol=2e-4, err_msg=path)


@pytest.mark.slow
def test_only_factors_change_and_have_moments_on_every_mesh(arrays):
    config = change(STEP_CONFIG, train={"lora_rank": RANK, "learning_rate": 1e-2})
    ends = []
    for mesh in (MESHES[0], MESHES[3]):
        trainer = Trainer(change(config, mesh=mesh))
        state = trainer.fresh()
        born = jax.device_get(state.params)
        for step in (1, 2):
            state, values = trainer.step(state, sharding.put_batch(arrays, trainer.mesh), trainer.dropout_key(step))
        ends.append((jax.device_get(state.params), float(values["loss"])))
    before, after = leaves(born), leaves(ends[0][0])
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert changed == {path for path in before if "lora_" in path}
    moments = sum(x.size for x in jax.tree.leaves(state.optimizer) if x.ndim)
    assert moments == 2 * sum(before[path].size for path in changed)
    assert abs(ends[0][1] - ends[1][1]) < 2e-6
    close(ends[0][0], ends[1][0], atol=2e-5)


@pytest.mark.slow
def test_run_starts_and_ends_with_whole_weights(whole, tmp_path):
    settings = {"init_from": str(whole), "lora_rank": RANK, "learning_rate": 1e-2, "steps": 4}
    settings |= {"evaluate_every": 100, "evaluate_examples": 1, "checkpoint_every": 100}
    config = dataclasses.replace(change(CONFIG, train=settings), model=None)
    assert fit(config, tmp_path / "straight") == 0
    assert fit(change(config, train={"steps": 2}), tmp_path / "parted") == 0
    assert fit(config, tmp_path / "parted") == 0
    a, b = (untimed(metrics(tmp_path / name)) for name in ("straight", "parted"))
    assert [line for line in a if line["event"] == "train"] == [line for line in b if line["event"] == "train"]
    assert a[-1]["params_fp"] == b[-1]["params_fp"]
    saved = checkpoint.Store(tmp_path / "straight/checkpoints").restore(4).items["params"]
    origin = leaves(checkpoint.open_run(whole).items["params"])
    kept = {path: x for path, x in leaves(saved).items() if "lora_" not in path}
    assert kept.keys() == origin.keys() and all((x == origin[path]).all() for path, x in kept.items())
    opened = leaves(checkpoint.open_run(tmp_path / "straight").items["params"])
    expected = by_hand(saved)
    assert opened.keys() == origin.keys()
    for path, x in opened.items():
        np.testing.assert_allclose(x, expected[path], atol=1e-6)
    best = checkpoint.open_run(tmp_path / "straight", best=True)
    assert leaves(best.items["params"]).keys() == origin.keys()


@pytest.mark.slow
def test_decoding_merges_factors():
    params = random_factors()
    merged = unflatten_dict(by_hand(params), sep="/")
    close(XLA.prepare(t5.T5(DEEP), params), XLA.prepare(t5.T5(DEEP), merged), atol=1e-6)


@pytest.mark.slow
def test_adafactor_updates_factors_that_start_at_zero(arrays):
    config = change(STEP_CONFIG, train={"lora_rank": RANK, "optimizer": "adafactor", "learning_rate": 1e-3})
    config = change(config, train={"warmup_steps": 1})
    trainer = Trainer(config)
    state, _ = trainer.step(trainer.fresh(), sharding.put_batch(arrays, trainer.mesh), trainer.dropout_key(1))
    moved = [np.abs(x).mean() for path, x in leaves(state.params).items() if path.endswith("/lora_b")]
    assert min(moved) > 1e-4


def test_a_frozen_encoder_gets_no_factors():
    config = change(STEP_CONFIG, train={"lora_rank": RANK, "freeze": "encoder"})
    params = leaves(Trainer(config).abstract.params)
    assert {path.partition("/")[0] for path in params if "lora_" in path} == {"decoder"}


def test_random_weights_are_trained_whole(tmp_path):
    with pytest.raises(UserError, match=r"train\.lora_rank: found 2 without train\.init_from"):
        fit(change(CONFIG, train={"lora_rank": RANK}), tmp_path / "run")


def test_trained_parameters_follow_freeze_and_rank():
    base = {"freeze": "none", "lora_rank": 0}
    paths = ("shared/embedding", "encoder/layers_0/a/query/lora_a", "decoder/layers_0/a/query/kernel")
    for settings, expected in [
        (base, (True, True, True)),
        ({**base, "freeze": "encoder"}, (False, False, True)),
        ({**base, "lora_rank": 2}, (False, True, False)),
        ({"freeze": "encoder", "lora_rank": 2}, (False, False, False)),
    ]:
        is_trained = optimizer.trained_paths(change(CONFIG, train=settings).train)
        assert tuple(map(is_trained, paths)) == expected
