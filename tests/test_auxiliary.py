"""Auxiliary parameters with a frozen backbone: their training, their item in checkpoints, and refusals."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import pipejax
from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps.demo import DemoTask
from pipejax.checkpoint import Store
from pipejax.config import Config
from pipejax.convert import from_hf, to_hf
from pipejax.convert.quantized import quantize
from pipejax.training.loop import fit
from pipejax.training.step import Trainer
from support import oracle
from support.foreign_auxiliary import Even
from support.refusals import refuses
from support.tiny import MODEL, RUN_ON_ONE, change, metrics

pytestmark = pytest.mark.usefixtures("compiled_once")
CLASS = "support.foreign_auxiliary:Even"


def config_of(base: Path, **train: Any) -> Config:
    """The config of a training of `Even` with a checkpoint."""
    settings = {"init_from": str(base), "freeze": "backbone", "steps": 4, "evaluate_every": 4, "learning_rate": 0.05}
    config = change(RUN_ON_ONE, train={**settings, "checkpoint_every": 2, "warmup_steps": 1, **train})
    return dataclasses.replace(config, auxiliary=Even())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights."""
    place = tmp_path_factory.mktemp("base")
    tokenizer = place / "tokenizer"
    tokenizer.mkdir()
    DemoTask().tokenizer().save(tokenizer)
    config = change(RUN_ON_ONE, train={"method": "pipelined"})
    params = oracle.random_params(MODEL, np.random.default_rng(3))
    checkpoint.save_params(place / "run", config, params, tokenizer_source=tokenizer)
    return place / "run"


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    """A run that trained `Even` with the checkpoint."""
    place = base.parent / "even"
    assert fit(config_of(base), place) == 0
    return place


def arrays(run: Path, item: str) -> dict[str, np.ndarray]:
    """The arrays of an item of a run's newest step, by path."""
    restored = checkpoint.open_run(run)
    found = jax.tree_util.tree_leaves_with_path(restored.items[item])
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in found}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"grid": {"delay": 3}}, "grid.delay: found 3, but these weights were trained with 2"),
        ({"train": {"method": "sequential"}}, "these weights were trained with the pipelined method"),
    ],
)
def test_a_frozen_model_keeps_its_method_and_grid(base: Path, tmp_path: Path, settings: Any, line: str) -> None:
    with refuses("train.freeze", line):
        fit(change(config_of(base), **settings), tmp_path / "run")


def test_the_vector_is_trained_and_the_backbone_is_not(base: Path, run: Path) -> None:
    before, after = arrays(base, "params"), arrays(run, "params")
    assert before.keys() == after.keys()
    for path, x in before.items():
        np.testing.assert_array_equal(x, after[path])
    assert [*arrays(run, "auxiliary")] == ["['vector']"]
    log = metrics(run)
    losses = [line["dev_loss"] for line in log if line["event"] == "evaluation"]
    first = Trainer(config_lib.override(config_of(base), []))
    assert losses and np.isfinite(losses[-1])
    assert {"params", "auxiliary", "state"} == first.templates().keys()
    assert Store(run / "checkpoints").verify(4).keys() == {"params", "auxiliary", "state"}
    assert Store(run / "best").verify(4).keys() == {"params", "auxiliary"}


def test_the_loss_equals_numpy(base: Path, run: Path) -> None:
    """The loss is the mean squared error over the source tokens of the evaluated examples."""
    from pipejax.data import make_task
    from pipejax.data.encoding import encode_example

    config = checkpoint.open_run(run).config
    params, vector = oracle.random_params(MODEL, np.random.default_rng(3)), arrays(run, "auxiliary")["['vector']"]
    task = make_task(config.data)
    examples = task.examples("dev")[: config.train.evaluate_examples]
    words = task.tokenizer()
    assert words is not None
    errors: list[float] = []
    for example in examples:
        ids = [int(i) for i in encode_example(example, words, config, MODEL).source]
        errors.extend((oracle.encode(params, MODEL, ids) @ vector - (np.asarray(ids) % 2 == 0)) ** 2)
    (line,) = [line for line in metrics(run) if line["event"] == "evaluation"]
    assert line["dev_loss"] == pytest.approx(np.mean(errors), rel=1e-4)


@pytest.mark.slow
def test_resumed_training_equals_uninterrupted_training(base: Path, run: Path) -> None:
    place = base.parent / "stopped"
    assert fit(config_of(base, steps=2), place) == 0
    assert fit(config_of(base), place) == 0
    np.testing.assert_array_equal(arrays(place, "auxiliary")["['vector']"], arrays(run, "auxiliary")["['vector']"])
    with refuses("auxiliary.scale"):
        fit(dataclasses.replace(config_of(base), auxiliary=Even(scale=0.2)), place)


@pytest.mark.slow
def test_a_drafter_finds_the_parameters_of_its_run(base: Path, run: Path) -> None:
    named = {"decode.draft": "support.foreign_auxiliary:FromEven"}
    given = [[5, 9, 12, 7, 1], [8, 6, 1]]
    expected = pipejax.load(run).decode(given)
    found = pipejax.load(run, overrides=named).decode(given)
    assert [record["row_ids"] for record in found] == [record["row_ids"] for record in expected]
    with refuses("Even", found="no auxiliary parameters"):
        pipejax.load(base, overrides=named)
    vector = checkpoint.open_auxiliary(run, pipejax.load(base).origin["params_fp"])["vector"]
    np.testing.assert_array_equal(vector, arrays(run, "auxiliary")["['vector']"])
    with refuses(run, found="trained for the model with params_fp"):
        checkpoint.open_auxiliary(run, "another")
    with refuses(base, found="no auxiliary parameters"):
        checkpoint.open_auxiliary(base, "")


def test_conversions_keep_the_parameters(run: Path, tmp_path: Path) -> None:
    to_hf(run, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "back")
    quantize(run, tmp_path / "int8")
    for other in ("back", "int8"):
        np.testing.assert_array_equal(
            arrays(tmp_path / other, "auxiliary")["['vector']"], arrays(run, "auxiliary")["['vector']"]
        )
    from safetensors.numpy import load_file, save_file

    weights = tmp_path / "hf" / "model.safetensors"
    changed = load_file(weights)
    changed["shared.weight"] = changed["shared.weight"] + 1
    save_file(changed, weights, metadata={"format": "pt"})
    with refuses("auxiliary.safetensors", found="trained for the model with params_fp"):
        from_hf(tmp_path / "hf", tmp_path / "other")
    (tmp_path / "hf" / "auxiliary.safetensors").unlink()
    with refuses("auxiliary.safetensors", "no such file"):
        from_hf(tmp_path / "hf", tmp_path / "other")


def test_incompatible_settings_raise_one_line(base: Path, tmp_path: Path) -> None:
    named = [f"auxiliary={CLASS}", "train.freeze=backbone"]
    assert config_lib.override(RUN_ON_ONE, [*named, "auxiliary.scale=0.5"]).auxiliary == Even(scale=0.5)
    with refuses("train.freeze", found="backbone without auxiliary parameters"):
        config_lib.override(RUN_ON_ONE, ["train.freeze=backbone"])
    with refuses("train.freeze", found="none with auxiliary parameters"):
        config_lib.override(RUN_ON_ONE, named[:1])
    with refuses("train.lora_rank", found="4"):
        config_lib.override(RUN_ON_ONE, [*named, "train.lora_rank=4"])
    with refuses("auxiliary", found="without train.init_from"):
        fit(config_lib.override(RUN_ON_ONE, named), tmp_path / "run")
    with refuses("auxiliary", found="not a subclass of Auxiliary"):
        config_lib.override(RUN_ON_ONE, ["auxiliary=support.foreign_auxiliary:FromEven"])


def test_class_of_the_documentation_has_its_documented_loss() -> None:
    """Compares the mean cross-entropy of "this source token is in the answer" for a batch of two sources."""
    page = (Path(__file__).parents[1] / "docs" / "auxiliary.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:1]
    found: dict[str, Any] = {"__name__": "in_answer"}
    exec(code, found)
    head, chance = found["InAnswer"](), np.random.default_rng(0)
    assert head.init_params(jax.random.key(0), MODEL)["vector"].shape == (MODEL.d_model,)
    source, lengths = np.asarray([[5, 9, 7, 1], [8, 8, 1, 0]]), [4, 3]
    answers = [[9, 5, 1], [7, 1, 1]]
    batch = {
        "source": source,
        "source_length": np.asarray(lengths),
        "inputs": np.zeros((2, 3), np.int32),
        "targets": np.asarray(answers),
        "weights": np.asarray([[1, 1, 1], [1, 1, 0]], np.float32),
        "slots": np.asarray([3, 2]),
        "example": np.zeros((2, 3), np.int32),
    }
    encoded, vector = chance.normal(size=(2, 4, MODEL.d_model)), chance.normal(size=MODEL.d_model)
    losses: list[float] = []
    for b, length in enumerate(lengths):
        for i in range(length):
            chance_in = 1 / (1 + np.exp(-encoded[b, i] @ vector))
            is_in = source[b, i] > 1 and source[b, i] in answers[b]
            losses.append(-np.log(chance_in if is_in else 1 - chance_in))
    outputs = SimpleNamespace(batch=batch, encoded=jax.numpy.asarray(encoded))
    total, count = head.loss({"vector": jax.numpy.asarray(vector)}, outputs)
    assert float(total) == pytest.approx(sum(losses), rel=1e-5) and int(count) == len(losses)
