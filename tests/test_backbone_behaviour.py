"""Each backbone is compared with transformers: logits, gradients, dropout, answers, rows and files."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from pipejax import checkpoint, testing
from pipejax.convert.huggingface import from_hf, to_hf
from support import in_transformers, schemas
from support.backbone_cases import CASES, T5GEMMA, T5GEMMA2, UMT5, UNTIED, BackboneCase, save_umt5
from support.in_transformers import (
    check_algorithm_1,
    check_beams,
    check_dropout,
    check_greedy_tokens,
    check_logits_and_gradients,
    check_schema,
)

BACKBONES = pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "case, model",
    [
        (T5GEMMA, T5GEMMA.model),
        pytest.param(T5GEMMA, UNTIED, marks=slow),
        (T5GEMMA2, T5GEMMA2.model),
        (UMT5, UMT5.model),
    ],
    ids=["t5gemma", "t5gemma-untied", "t5gemma2", "umt5"],
)
def test_logits_and_gradients_equal_torch(case: BackboneCase, model: Any) -> None:
    params, torchs = case.loaded(0, model)
    own, names = dict(torchs.named_parameters()), model.tensors()
    check_logits_and_gradients(
        model, params, torchs, case.logits(torchs), lambda path: own[case.name_in_module(names[path][0])]
    )


@BACKBONES
def test_dropout_has_the_places_of_torch(case: BackboneCase) -> None:
    params, torchs = case.loaded(0)
    check_dropout(case.model, params, torchs, case.logits(torchs))


@BACKBONES
def test_greedy_tokens_of_one_row_equal_generate(case: BackboneCase) -> None:
    params, torchs = case.loaded(0 if case is UMT5 else 2)
    check_greedy_tokens(case.model, params, torchs, lowest=case.lowest)


@pytest.mark.slow
@BACKBONES
def test_beams_equal_generate(case: BackboneCase) -> None:
    params, torchs = case.loaded(0 if case is UMT5 else 2)
    if case is UMT5:
        torchs.lm_head.weight.data *= UMT5.model.d_model**0.5  # `umt5_logits` has the reason
    check_beams(case.model, params, torchs, lowest=case.lowest)


@pytest.mark.parametrize(
    "name, delay",
    [
        ("t5gemma", 0),
        *(pytest.param(*x, marks=slow) for x in [("t5gemma", 2), *itertools.product(("t5gemma2", "umt5"), (0, 2))]),
    ],
)
def test_answers_under_a_schema_equal_algorithm_1_over_transformers(name: str, delay: int) -> None:
    case = CASES[name]
    model = dataclasses.replace(case.model, vocab_size=len(schemas.PIECES) + 3)
    params, torchs = case.loaded(5 if case is T5GEMMA else 4, model)
    check_schema(model, params, case.logits(torchs), delay=delay)


@pytest.fixture(scope="module", params=[*CASES.values()], ids=[*CASES])
def models(request: pytest.FixtureRequest) -> Any:
    """A backbone, and its parameters and the logits of transformers for a seed."""
    case: BackboneCase = request.param
    torchs = case.make(case.model)

    def model(seed: int) -> tuple[Any, in_transformers.Logits]:
        params = case.params(case.model, seed)
        return params, case.logits(case.load(torchs, case.model, params))

    return case, model


@pytest.mark.parametrize("delay, literal, count", [(2, False, 3), pytest.param(1, True, 8, marks=slow)])
def test_rows_equal_algorithm_1_over_transformers(delay: int, literal: bool, count: int, models: Any) -> None:
    case, model = models
    assert check_algorithm_1(case.model, model, count, delay=delay, literal=literal) > case.window


@pytest.mark.long
@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_rows_of_many_models_equal_algorithm_1_over_transformers(delay: int, literal: bool, models: Any) -> None:
    case, model = models
    check_algorithm_1(case.model, model, 25, delay=delay, literal=literal)


@pytest.mark.slow
@BACKBONES
def test_check_backbone_passes(case: BackboneCase) -> None:
    assert f"{type(case.model).__name__}: " in testing.check_backbone(dataclasses.replace(case.model, vocab_size=64))


@pytest.mark.parametrize(
    "case, model",
    [(T5GEMMA, T5GEMMA.model), (T5GEMMA, UNTIED), (T5GEMMA2, T5GEMMA2.model), (UMT5, UMT5.model)],
    ids=["t5gemma", "t5gemma-untied", "t5gemma2", "umt5"],
)
def test_conversion_round_trips(case: BackboneCase, model: Any, tmp_path: Path, capsys: Any) -> None:
    """A directory of transformers names the class by its model_type, and its tensors are equal in every bit."""
    _, torchs = case.loaded(3, model)
    if case is UMT5:
        save_umt5(torchs, tmp_path / "there")
    else:
        torchs.save_pretrained(tmp_path / "there")
    from_hf(tmp_path / "there", tmp_path / "run")
    err = capsys.readouterr().err
    assert ("tensors of the vision tower, because sources are text only" in err) == (case is T5GEMMA2)
    assert checkpoint.open_run(tmp_path / "run").config.model == model
    to_hf(tmp_path / "run", tmp_path / "back")
    there, back = (load_file(tmp_path / place / "model.safetensors") for place in ("there", "back"))
    images = {name for name in there if ".vision_tower." in name or ".multi_modal_projector." in name}
    assert bool(images) == (case is T5GEMMA2) and there.keys() - images == back.keys()
    assert all(np.array_equal(there[name], x) for name, x in back.items())
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    if case is T5GEMMA2:
        config.encoder.vision_config, config.encoder.mm_tokens_per_image = torchs.config.encoder.vision_config, 4
    more = {"attn_implementation": "eager"} if case is T5GEMMA else {}
    again = type(torchs).from_pretrained(tmp_path / "back", config=config, **more).eval()
    if case is not UMT5:  # transformers scales its head: see the tests of UMT5's heads
        assert again.config.decoder.layer_types == torchs.config.decoder.layer_types
        given = [torch.from_numpy(x) for x in in_transformers.batch(model, 9)]
        with torch.no_grad():
            logits = [case.logits(x)(*given[:3], given[3][0], given[4][0]) for x in (torchs, again)]
        assert torch.equal(*logits)
