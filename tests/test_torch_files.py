"""torch's files read without torch: against torch itself, and against files that want more than tensors."""

import collections
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipejax.convert import read_hf, torch_files
from pipejax.convert.huggingface import write_hf
from pipejax.convert.tensor_files import open_tensors
from pipejax.system.errors import UserError
from support import oracle, tiny, trees

WIDE = torch.arange(24, dtype=torch.float32).reshape(4, 6)
TENSORS = {
    "whole": WIDE,
    "turned": WIDE.T,
    "part": WIDE[1:3, 2::2],
    "number": torch.tensor(3.5),
    "none": torch.zeros(0, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "brain": torch.tensor([[1.5], [3.0]], dtype=torch.bfloat16),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
}


def in_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("ordered", [False, True])
def test_tensors_are_those_of_torch(ordered: bool, tmp_path: Path) -> None:
    """Views of one storage, odd strides, parameters, and what a state dict holds beside its tensors."""
    state: Any = TENSORS
    if ordered:
        state = collections.OrderedDict(TENSORS)
        state._metadata = collections.OrderedDict(version=1)  # as of a module's state_dict
    torch.save(state, tmp_path / "pytorch_model.bin")
    file, found = open_tensors(tmp_path)
    assert file.name == "pytorch_model.bin" and found.keys() == TENSORS.keys()
    assert [found[name].dtype for name in ("whole", "half", "brain")] == ["F32", "F16", "BF16"]
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(found[name].read().astype(np.float32), in_numpy(tensor))


def test_a_t5_in_shards(tmp_path: Path) -> None:
    """The parameters are those of safetensors; tied tables that torch keeps three times are one."""
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(0))
    write_hf(tiny.MODEL, params, tmp_path / "safe", None)
    write_hf(tiny.MODEL, params, tmp_path / "torch", None)
    expected = read_hf(tmp_path / "safe")
    arrays = {name: stored.read() for name, stored in open_tensors(tmp_path / "safe")[1].items()}
    state = {name: torch.tensor(array) for name, array in arrays.items()}
    state |= dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), state["shared.weight"])
    (tmp_path / "torch" / "model.safetensors").unlink()
    halves = dict(list(state.items())[::2]), dict(list(state.items())[1::2])
    places = {name: f"pytorch_model-{i}.bin" for i, half in enumerate(halves) for name in half}
    for i, half in enumerate(halves):
        torch.save(half, tmp_path / "torch" / f"pytorch_model-{i}.bin")
    index = tmp_path / "torch" / "pytorch_model.bin.index.json"
    index.write_text(f'{{"weight_map": {str(places).replace(chr(39), chr(34))}}}')
    found = read_hf(tmp_path / "torch")
    assert found[0] == expected[0]
    trees.same_bits(found[1], expected[1])


class Runs:
    """What a pickle calls when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize(
    "wants, named",
    [
        (Runs(os.mkdir, "made"), "posix.mkdir"),
        (Runs(eval, "open('made', 'w')"), "eval"),
        (Runs(getattr, "x", "upper"), "getattr"),
        (Runs(torch.load, "x"), "torch.serialization.load"),
        (np.ones(2), "numpy"),
        (torch.nn.Linear(2, 2), "torch.nn"),
        ({"step": TENSORS["whole"], "args": collections.Counter()}, "collections.Counter"),
        ({"step": 3}, "no dict of tensors"),
        ([TENSORS["whole"]], "no dict of tensors"),
    ],
)
def test_all_else_is_refused(wants: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(wants, "pytorch_model.bin")
    with pytest.raises(UserError, match=rf"^{tmp_path}/pytorch_model.bin: found .*{named}"):
        open_tensors(tmp_path)
    assert os.listdir() == ["pytorch_model.bin"]


def test_a_tensor_stays_within_its_storage(tmp_path: Path) -> None:
    """Numbers of a pickle that reach beyond the bytes of the archive, or before them."""
    storage = torch_files.Storage("FloatStorage", "x", 6)
    for offset, shape, strides in (
        (3, (2, 2), (2, 1)),
        (-1, (2,), (1,)),
        (0, (7,), (1,)),
        (5, (2,), (-1,)),
        (0, (2,), (6,)),
        (0, (10**12,), (0,)),  # which would be read into memory
    ):
        with pytest.raises(ValueError, match="outside of its storage"):
            torch_files._rebuild_tensor(storage, offset, shape, strides)
    assert torch_files._rebuild_tensor(storage, 2, (2, 2), (2, 1)).offset == 2


def test_older_files_are_named(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"torch before 1\.6"):
        open_tensors(tmp_path)


def test_damage_is_one_line_or_no_harm(tmp_path: Path) -> None:
    """Bytes that changed, and files that end early: an error of ours, or the tensors as they were."""
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": WIDE, "b": TENSORS["brain"]}, file)
    whole, rng, refused = file.read_bytes(), np.random.default_rng(0), 0
    for trial in range(300):
        content = bytearray(whole[: rng.integers(len(whole))] if trial % 3 == 0 else whole)
        if trial % 3:
            content[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        try:
            found = {name: stored.read() for name, stored in open_tensors(tmp_path)[1].items()}
        except UserError as error:
            assert str(error).startswith(str(file)) and "\n" not in str(error)
            refused += 1
            continue
        for name, array in found.items():
            expected = {"a": WIDE, "b": TENSORS["brain"]}.get(name)
            if expected is not None and array.shape == tuple(expected.shape):
                np.testing.assert_array_equal(array.astype(np.float32), in_numpy(expected))
    assert refused > 100
