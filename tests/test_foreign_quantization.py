"""Directories that another library quantised are refused, and settings of plain weights are reported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from safetensors.torch import load_file, save_file

from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.convert import from_hf, read_hf
from pipejax.convert.huggingface import write_hf
from pipejax.system.errors import UserError
from support import oracle, tiny
from support.in_transformers import varied

Q = "encoder.block.0.layer.0.SelfAttention.q"
Tensors = dict[str, torch.Tensor]


def narrow(dtype: torch.dtype, **more: torch.Tensor) -> Callable[[Tensors], Tensors]:
    """Converts a matrix to a dtype, and adds other tensors."""
    return lambda found: (
        found | {f"{Q}.weight": found[f"{Q}.weight"].to(dtype)} | {f"{Q}.{name}": x for name, x in more.items()}
    )


def packed(found: Tensors) -> Tensors:
    """A matrix as GPTQ and AWQ write it: no weight, but several of its digits in an int32."""
    parts = {"qweight": torch.zeros(2, 16, dtype=torch.int32), "qzeros": torch.zeros(1, 2, dtype=torch.int32)}
    parts |= {"scales": torch.ones(1, 16, dtype=torch.float16)}
    return {name: x for name, x in found.items() if name != f"{Q}.weight"} | {f"{Q}.{k}": x for k, x in parts.items()}


SCALE = torch.ones(16, 1)
QUANTISED: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "bitsandbytes, 8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        narrow(torch.int8, SCB=torch.ones(16), weight_format=torch.zeros((), dtype=torch.uint8)),
        "bitsandbytes",
    ),
    "bitsandbytes, 4 bits": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda found: found | {f"{Q}.weight": torch.zeros(128, 1, dtype=torch.uint8)},
        "bitsandbytes",
    ),
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, packed, "gptq"),
    "AWQ": ({"quant_method": "awq", "bits": 4}, packed, "awq"),
    "fp8": ({"quant_method": "fp8"}, narrow(torch.float8_e4m3fn, weight_scale_inv=SCALE), "fp8"),
    "torchao": ({"quant_method": "torchao"}, narrow(torch.int8, weight_scale=SCALE), "torchao"),
    "scales beside floats": (
        {"quant_method": "compressed-tensors"},
        narrow(torch.bfloat16, weight_scale=SCALE),
        "compr",
    ),
    "float64": ({"quant_method": "new"}, narrow(torch.float64), "new"),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original") / "t5"
    write_hf(tiny.MODEL, oracle.random_params(tiny.MODEL, np.random.default_rng(5)), directory, None)
    return directory


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    (tmp_path / "t5").mkdir()
    for file in original.iterdir():
        (tmp_path / "t5" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "t5"


def set_facts(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_refused_with_the_method(kind: str, directory: Path, tmp_path: Path) -> None:
    settings, spoil, method = QUANTISED[kind]
    set_facts(directory, quantization_config=settings)
    save_file(spoil(load_file(directory / "model.safetensors")), directory / "model.safetensors")
    with pytest.raises(UserError) as found:
        from_hf(directory, tmp_path / "run")
    said = str(found.value)
    assert Q in said and f"; config.json: quantization_config ('{method}" in said, said
    assert said.endswith(
        "quantised weights are not read "
        "(load the model in transformers, call its dequantize(), and save it with save_pretrained)"
    )
    assert not (tmp_path / "run").exists() and "\n" not in said


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("", {"quantization_config": {"quant_method": "fp8"}}, "config.json: quantization_config ('fp8')"),
        ("", {"quantization_config": {"bits": 4}}, "config.json: quantization_config ('a method without a name')"),
        ("", {"quantization_config": "int8"}, "config.json: quantization_config ('int8')"),
        ("", {"compression_config": {"quant_method": "sparse"}}, "config.json: compression_config ('sparse')"),
        ("quantize_config.json", {"bits": 4}, "quantize_config.json"),
        ("quant_config.json", {"w_bit": 4}, "quant_config.json"),
        ("hf_quant_config.json", {"producer": {}}, "hf_quant_config.json"),
    ],
)
def test_quantization_settings_of_plain_weights_are_reported(
    file: str, text: dict[str, Any], expected: str, original: Path, directory: Path, capsys: Any
) -> None:
    """Parameters equal those of a conversion of the same directory without these settings."""
    if file:
        (directory / file).write_text(json.dumps(text))
    else:
        set_facts(directory, **text)
    model, params = read_hf(directory)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"{directory}: {expected}: ignored, because the weights are not quantised"]
    same, others = read_hf(original)
    assert model == same
    flat = flatten_dict(others)
    assert all(np.array_equal(array, flat[path]) for path, array in flatten_dict(params).items())


@pytest.mark.parametrize("text", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_settings_that_are_empty_are_not_reported(text: dict[str, Any], directory: Path, capsys: Any) -> None:
    set_facts(directory, **text)
    read_hf(directory)
    assert not capsys.readouterr().err


SIDE = GemmaStack(16, 24, 4, 2, 6, 6, 4)


@pytest.mark.parametrize(
    ("model", "place"),
    [
        (T5GemmaConfig(SIDE, SIDE, 50, 1, 1), "decoder"),
        (T5Gemma2Config(SIDE, SIDE, 50, 1, 1), "encoder.text_config"),
        (T5Gemma2Config(SIDE, SIDE, 50, 1, 1), "encoder"),
    ],
)
def test_settings_of_a_part_are_reported(model: Any, place: str, tmp_path: Path, capsys: Any) -> None:
    write_hf(model, varied(model, 0, centered=True), tmp_path / "there", None)
    facts = json.loads((tmp_path / "there/config.json").read_text())
    part = facts
    for name in place.split("."):
        part = part[name]
    part["quantization_config"] = {"quant_method": "quanto"}
    (tmp_path / "there/config.json").write_text(json.dumps(facts))
    read_hf(tmp_path / "there")
    assert f"config.json: {place}.quantization_config ('quanto'): ignored" in capsys.readouterr().err
