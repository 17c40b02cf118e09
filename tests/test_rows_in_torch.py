"""Rows in transformers' `generate`: the file that `convert to-hf` writes, against Algorithm 1 in plain lists."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipejax.config import Config, T5Config
from pipejax.convert import description, huggingface
from support import oracle
from support.tiny import FEW_WORDS

GATED = dataclasses.replace(FEW_WORDS, feed_forward="gated-gelu", tied_head=False, scale_head=False)
# backbone and what is given to `generate`; three names of rows are drawn where there are to be some
SETTINGS: list[tuple[T5Config, dict[str, Any]]] = [
    (FEW_WORDS, {"delay": 1, "time_max": 12, "sub_max": 5}),
    (FEW_WORDS, {"delay": 2, "time_max": 9, "sub_max": 4, "literal": True}),
    (FEW_WORDS, {"delay": 3, "time_max": 14, "sub_max": 4}),
    (FEW_WORDS, {"delay": 1, "time_max": 14, "sub_max": 9, "unique": True}),
    (FEW_WORDS, {"delay": 0, "time_max": 9, "sub_max": 3, "row_names": 3}),
    (FEW_WORDS, {"delay": 2, "time_max": 16, "sub_max": 8, "row_names": 3}),
    (GATED, {"delay": 1, "time_max": 14, "sub_max": 8}),
]
# A process that has neither pipejax nor JAX.
CHILD = """
import json, sys
sys.path[:] = [path for path in sys.path if path != sys.argv[2]]
sys.modules["jax"] = sys.modules["pipejax"] = None
import torch
from transformers import T5ForConditionalGeneration

torch.set_num_threads(1)
found = []
for case in json.load(open("cases.json")):
    model = T5ForConditionalGeneration.from_pretrained(case["directory"])
    length = max(map(len, case["sources"]))
    ids = torch.tensor([source + [0] * (length - len(source)) for source in case["sources"]])
    mask = torch.tensor([[1] * len(source) + [0] * (length - len(source)) for source in case["sources"]])
    given = dict(input_ids=ids, attention_mask=mask, custom_generate=".", trust_remote_code=True, **case["settings"])
    answer = model.generate(**given, return_dict_in_generate=True)
    assert (model.generate(**given) == answer.sequences).all()
    found.append([answer.sequences.tolist(), answer.rows, answer.steps, answer.truncated])
print(json.dumps(found))
"""


def transformers_writes(directory: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """The answers of the child to each case: sequences, rows, steps and bounds of a batch."""
    (directory / "custom_generate").mkdir()
    (directory / description.GENERATE).write_text(description.custom_generate(Config(), None) or "")
    (directory / "cases.json").write_text(json.dumps(cases))
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "", root], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("models", [pytest.param(3, marks=pytest.mark.slow), pytest.param(43, marks=pytest.mark.long)])
def test_rows_are_those_of_algorithm_1(models: int, tmp_path: Path) -> None:
    """In batches, without pipejax and JAX: rows, steps, bounds, and the sequence of tokens that joins them."""
    rng, cases, expected = np.random.default_rng(0), [], []
    for number in range(models * len(SETTINGS)):
        model, settings = SETTINGS[number % len(SETTINGS)]
        params = oracle.random_params(model, rng, scale=0.5 + rng.random(), eos_scale=1 + rng.random())
        directory = tmp_path / str(number)
        huggingface.write_hf(model, params, directory, None)
        sources = [[*rng.integers(2, 9, rng.integers(1, 9)).tolist(), 1] for _ in range(3)]
        names = [rng.integers(2, 9, rng.integers(1, 3)).tolist() for _ in range(settings.get("row_names", 0))]
        given = settings | {"row_names": names, "separator": [2, 3]}
        cases.append({"directory": str(directory), "sources": sources, "settings": given})
        beyond = [[1]] if names and settings["delay"] else []  # a row that has no name is the empty one
        stop = "literal" if settings.get("literal") else "empty_row"
        bounds = {key: settings[key] for key in ("delay", "time_max", "sub_max")}
        expected += [
            oracle.algorithm1(
                oracle.grid_next_tokens(params, model, oracle.encode(params, model, source), settings["delay"]),
                stop=stop,
                prefixes=names + beyond,
                unique=settings.get("unique", False),
                **bounds,
            )
            for source in sources
        ]
    batches = transformers_writes(tmp_path, cases)
    found = [one for batch in batches for one in zip(*batch, strict=True)]
    assert len(found) == len(expected)
    for (sequence, rows, steps, truncated), answer in zip(found, expected, strict=True):
        assert (rows, steps, truncated) == (answer.rows, answer.steps, answer.truncated)
        joined = [token for i, row in enumerate(rows) for token in [*([2, 3] if i else []), *row]]
        assert sequence[: len(joined) + 2] == [0, *joined, 1] and not any(sequence[len(joined) + 2 :])
    assert any(len(answer.rows) > 2 for answer in expected) and any(answer.truncated for answer in expected)
