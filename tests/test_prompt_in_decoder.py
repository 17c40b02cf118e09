"""Prompt-in-decoder is compared with plain NumPy in float64: one prompt at a time, without a cache."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pipejax import config as config_lib
from pipejax import testing
from pipejax.apps import demo
from pipejax.apps.family.prompts import PromptInDecoder
from pipejax.config import Config, GridConfig
from pipejax.data.batches import collate
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.inference.generator import Generator
from pipejax.system.errors import UserError
from pipejax.training.step import Trainer
from support import oracle
from support.tiny import FEW_WORDS, MODEL, RUN_ON_ONE, change

pytestmark = pytest.mark.usefixtures("compiled_once")

EOS = 1
METHOD = PromptInDecoder(GridConfig(delay=0, time_max=9, sub_max=3))
WITH_NAMES = PromptInDecoder(GridConfig(delay=0, time_max=8, sub_max=3, row_names=("red", "old lamps")))


def answer(params: Any, source: Sequence[int], prompt: Sequence[int]) -> tuple[list[int], int, float]:
    """The row of one prompt by ordinary greedy decoding; its steps; the smallest margin of a token."""
    encoded, row, margins = oracle.encode(params, FEW_WORDS, source), [*prompt], [np.inf]
    while len(row) < METHOD.grid.time_max and (len(row) == len(prompt) or row[-1] != EOS):
        logits = oracle.grid_logits(params, FEW_WORDS, encoded, [[0, *row]], 1)[0][-1]
        row.append(int(logits.argmax()))
        margins.append(np.diff(np.sort(logits))[-1])
    return [token for token in row if token != EOS], len(row), min(margins)


@pytest.mark.slow
def test_answers_equal_plain_python() -> None:
    """Each prompt has the answer that it has alone; drafts and batches change no answer."""
    rng, seen, compared = np.random.default_rng(4), set[int](), 0
    for seed in range(2):
        params = oracle.random_params(FEW_WORDS, np.random.default_rng(seed), eos_scale=2.5)
        generator = Generator(Config(model=FEW_WORDS, method=METHOD), params, None)
        records: list[dict[str, Any]] = []
        for count in (1, 2, 3, 3, 2, 3):
            source = [*rng.integers(2, 9, rng.integers(2, 9)).tolist(), EOS]
            prompts = [rng.integers(2, 9, rng.integers(1, 4)).tolist() for _ in range(count)]
            records.append({"source_ids": source, "row_prefixes": prompts})
        runs = [generator.decode(records, batch_size=size) for size in (1, 4)]
        runs.append(generator.decode(records, batch_size=2, draft="jacobi"))
        for i, record in enumerate(records):
            alone = [answer(params, record["source_ids"], prompt) for prompt in record["row_prefixes"]]
            if min(margin for *_, margin in alone) < 1e-4:
                continue
            for found in runs:
                assert found[i]["row_ids"] == [row for row, *_ in alone]
                assert found[i]["steps"] == max(steps for _, steps, _ in alone)
            seen.update(len(row) for row, *_ in alone)
            compared += 1
    assert len(seen) > 3 and compared > 8


def test_loss_equals_plain_python() -> None:
    """The loss is the mean of the rows' losses: no row sees another row, and prompts have no loss."""
    words, config = demo.DemoTask().tokenizer(), dataclasses.replace(RUN_ON_ONE, method=WITH_NAMES)
    rows = ("red apples maps", "old lamps bread")
    one = encode_example(Example("0", "the clerk", rows), words, config, MODEL)
    params, total, tokens = oracle.random_params(MODEL, np.random.default_rng(3)), 0.0, 0
    seen = oracle.encode(params, MODEL, one.source.tolist())
    for row, prompt in zip(rows, WITH_NAMES.grid.row_names, strict=True):
        ids, known = words.encode(row), len(words.encode(prompt))
        logits = oracle.grid_logits(params, MODEL, seen, [[0, *ids]], 1)[0]
        for j, token in enumerate([*ids, EOS]):
            if j >= known:
                total += np.log(np.exp(logits[j] - logits[j][token]).sum())
                tokens += 1
    trainer = Trainer(change(config, train={"batch_size": 1, "accumulate": 1}))
    found, count = trainer.dev_loss(params, collate([one]).arrays)
    assert count == tokens == 5
    assert float(found) == pytest.approx(total, rel=1e-5)


def test_prompts_are_settings_of_the_method() -> None:
    prompts = json.dumps(["red", "old"])
    config = config_lib.override(Config(), ["method=prompt_in_decoder", f"method.grid.row_names={prompts}"])
    assert config.method == PromptInDecoder(GridConfig(delay=0, row_names=("red", "old")))
    with pytest.raises(UserError, match=r"^method\.grid\.delay: found 2; expected 0, since all rows start at once$"):
        PromptInDecoder(GridConfig(delay=2, row_names=("red",))).check()


@pytest.mark.slow
def test_method_keeps_the_rules() -> None:
    rows = ("red apples", "old lamps maps"), ("red", "old lamps bread honey")
    assert testing.check_method(WITH_NAMES, targets=rows).startswith("PromptInDecoder: ")
