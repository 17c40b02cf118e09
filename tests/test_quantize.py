"""Checkpoints with weights in fewer bytes decode like the original with rounded weights."""

import dataclasses
import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from pipejax import checkpoint
from pipejax.apps.verify.checkpoint_command import verify
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, T5Config, TrainConfig
from pipejax.convert.__main__ import main as convert
from pipejax.inference.backends import Xla
from pipejax.inference.lazy_programs import dtype_of
from pipejax.inference.loading import load
from pipejax.kernels import cpu_kernel
from pipejax.kernels.backends import OwnKernel
from pipejax.model import lora, quantization, t5
from pipejax.system.errors import UserError
from pipejax.training import loop
from support import oracle, quantised
from support.manifests import seal
from support.refusals import refuses
from support.tiny import RUN_ON_ONE, change

pytestmark = pytest.mark.usefixtures("compiled_once")

MODEL = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_heads=2, num_layers=1, num_decoder_layers=1)
UNTIED = dataclasses.replace(MODEL, feed_forward="gated-gelu", tied_head=False, scale_head=False)
CONFIG = Config(
    model=MODEL,
    grid=GridConfig(delay=1, time_max=12, sub_max=4),
    data=DataConfig(task="none", separator=" "),
    train=TrainConfig(method="pipelined"),
    decode=DecodeConfig(max_length=12),
)
SOURCES = [np.random.default_rng(i).integers(2, 64, 3 + i).tolist() for i in range(8)]
NARROW = ("int8", "bfloat16")


def random_params(model):
    """Parameters whose outputs have all magnitudes; one output is zero."""
    params = oracle.random_params(model, np.random.default_rng(314))
    query = params["decoder"]["layers_0"]["self_attention"]["query"]
    query["kernel"] = query["kernel"] * np.logspace(-6, 2, query["kernel"].shape[1], dtype=np.float32)
    query["kernel"][:, 3] = 0
    return params


@pytest.fixture(scope="module")
def original(tmp_path_factory, tokenizer_files):
    """A checkpoint in float32, with a tokenizer."""
    directory = tmp_path_factory.mktemp("original") / "run"
    checkpoint.save_params(directory, CONFIG, random_params(MODEL), tokenizer_source=tokenizer_files)
    return directory


@pytest.fixture(scope="module")
def smaller(original, tmp_path_factory):
    """The same checkpoint with weights in fewer bytes, by their dtype."""
    made = {weights: tmp_path_factory.mktemp("smaller") / weights for weights in NARROW}
    for weights, out in made.items():
        assert convert(["quantize", str(original), str(out), "--weights", weights]) == 0
    return made


@pytest.mark.slow
@pytest.mark.parametrize("weights", NARROW)
def test_quantized_checkpoint_decodes_as_original_with_rounded_weights(weights, original, smaller):
    found, expected = load(smaller[weights]), load(original, overrides=[f"decode.weights={weights}"])
    records = expected.decode(SOURCES)
    assert found.decode(SOURCES) == records
    assert len({str(record["row_ids"]) for record in records}) > 5
    assert found.tokenizer is not None and found.default_method == "pipelined"


@pytest.mark.parametrize("weights", NARROW)
@pytest.mark.parametrize("model", [MODEL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("make", [Xla, lambda weights: OwnKernel(weights, cpu_kernel.LEVELS[0])], ids=["XLA", "kernel"])
def test_stored_weights_compute_bit_identical_results(weights, model, make):
    """Whole numbers and scales are stored, for every backend."""
    params = jax.tree.map(jnp.asarray, random_params(model))
    held = quantization.cast_or_quantize(params, jnp.float32, weights)
    prepare = jax.jit(partial(make(weights).prepare, t5.T5(model)))
    found, expected = prepare(held), prepare(params)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("weights", NARROW)
def test_saved_checkpoint_has_fewer_bytes_and_numpys_rounding(weights, original, smaller, tmp_path):
    """It is verified, with a quarter or half of the bytes; float32 of it is NumPy's rounding, also for Hugging Face."""
    (report,) = verify(smaller[weights] / "checkpoints")
    assert report["good"]
    restored = checkpoint.open_run(smaller[weights])
    assert restored.config.decode.weights == weights
    assert dataclasses.replace(restored.config, decode=CONFIG.decode) == CONFIG
    params = flatten_dict(random_params(MODEL), sep="/")
    entries = restored.arrays["params"]
    size = {path: np.prod(entry[1]) * jnp.dtype(entry[0]).itemsize for path, entry in entries.items()}
    matrices = {path for path in params if quantization.scale_path(path)}
    assert sum(size[path] for path in matrices) * (4 if weights == "int8" else 2) == sum(
        params[path].nbytes for path in matrices
    )
    assert {path for path in entries if path not in params} == (
        {quantization.scale_path(path) for path in matrices} if weights == "int8" else set()
    )
    found = flatten_dict(restored.items["params"], sep="/")
    wanted = flatten_dict(quantised.rounded(random_params(MODEL), weights), sep="/")
    assert found.keys() == params.keys()
    for path, x in wanted.items():
        assert found[path].dtype == np.float32
        np.testing.assert_array_equal(found[path], x, err_msg=path)
    convert(["to-hf", str(smaller[weights]), str(tmp_path / "hf")])
    tensors = load_file(tmp_path / "hf/model.safetensors")
    for path, (name, _) in MODEL.tensors().items():
        tensor = tensors[name].T if path.endswith("kernel") else tensors[name]
        np.testing.assert_array_equal(tensor, wanted[path], err_msg=name)


@pytest.mark.parametrize("weights", NARROW)
def test_to_hf_writes_the_rounded_weights_and_one_line(weights, smaller, tmp_path, capfd):
    capfd.readouterr()
    assert convert(["to-hf", str(smaller[weights]), str(tmp_path / "hf")]) == 0
    said = capfd.readouterr().err
    assert said.splitlines() == [
        f"{smaller[weights]}: its weights are {weights}; they are written in float32",
        "hf: custom_generate/generate.py in the directory writes rows in transformers; README.md describes how",
    ]
    assert said.endswith("how\n")
    expected = flatten_dict(checkpoint.open_run(smaller[weights]).items["params"], sep="/")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    for path, (name, _) in MODEL.tensors().items():
        array = tensors[name].T if path.endswith("kernel") else tensors[name]
        np.testing.assert_array_equal(array, expected[path], strict=True)


def test_to_hf_of_float32_weights_reports_nothing(original, tmp_path, capfd):
    capfd.readouterr()
    assert convert(["to-hf", str(original), str(tmp_path / "hf")]) == 0
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_quantizing_twice_changes_nothing(smaller, tmp_path):
    for weights in NARROW:
        convert(["quantize", str(smaller[weights]), str(tmp_path / weights), "--weights", weights])
        once, twice = (checkpoint.open_run(run).arrays for run in (smaller[weights], tmp_path / weights))
        assert once == twice


def test_low_rank_factors_are_merged_before(tmp_path):
    params = lora.add(jax.tree.map(jnp.asarray, random_params(MODEL)), 2, jax.random.key(0))
    for path, x in flatten_dict(params, sep="/").items():
        if path.endswith("lora_b"):
            node = params
            for name in path.split("/")[:-1]:
                node = node[name]
            node["lora_b"] = x + 0.1
    checkpoint.save_params(tmp_path / "run", CONFIG, params)
    convert(["quantize", str(tmp_path / "run"), str(tmp_path / "out")])
    found = flatten_dict(checkpoint.open_run(tmp_path / "out").items["params"], sep="/")
    for path, x in flatten_dict(quantised.rounded(lora.merge_factors(params), "int8"), sep="/").items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


# Refusals.


def test_no_file_is_overwritten_or_half_written(original, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    with refuses("there"):
        convert(["quantize", str(original), str(tmp_path / "there")])
    params = random_params(MODEL)
    params["decoder"]["norm"]["scale"][5] = np.nan
    checkpoint.save_params(tmp_path / "nan", CONFIG, params)
    with pytest.raises(UserError, match=r"nan/checkpoints/0: decoder/norm/scale: found 1 values that are NaN"):
        convert(["quantize", str(tmp_path / "nan"), str(tmp_path / "out")])
    with pytest.raises(UserError, match="found no best/"):
        convert(["quantize", "--best", str(original), str(tmp_path / "out")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nan", "there"]


def test_quantized_checkpoint_cannot_be_resumed(smaller):
    """A run can start from it, since `train.init_from` reads the arrays of `open_run`."""
    with refuses("int8"):
        loop.fit(change(RUN_ON_ONE, decode={"weights": "int8"}), smaller["int8"])
    assert [path.name for path in (smaller["int8"] / "checkpoints").iterdir()] == ["0"]


QUERY = "decoder/layers_0/cross_attention/query/"


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda arrays: arrays.pop(QUERY + "scale"), f"{QUERY}kernel: found int8 without a scale; expected one"),
        (lambda arrays: arrays[QUERY + "kernel"].__setitem__(0, "float32"), f"{QUERY}kernel: found float32 with a"),
        (lambda arrays: arrays["decoder/norm/scale"].__setitem__(0, "int8"), "decoder/norm/scale: found int8 without"),
        (lambda arrays: arrays[QUERY + "scale"].__setitem__(1, [7]), r"query/scale: found shape \[7\]; expected \["),
        (lambda arrays: arrays["shared/scale"].__setitem__(1, [32]), r"shared/scale: found shape \[32\]; expected"),
        (lambda arrays: arrays.update({QUERY + "scales": ["float32", [32], 0, 0]}), "scales: not in the config"),
    ],
)
def test_scales_that_do_not_fit_are_refused(spoil, says, smaller, tmp_path):
    shutil.copytree(smaller["int8"], tmp_path / "run")
    (manifest,) = (tmp_path / "run/checkpoints/0/manifest").glob("metadata")
    body = json.loads(manifest.read_text())
    spoil(body["arrays"]["params"])
    manifest.write_text(json.dumps(seal(body)))
    with pytest.raises(UserError, match=says):
        load(tmp_path / "run")


def test_changed_bit_is_detected(smaller, tmp_path):
    shutil.copytree(smaller["int8"], tmp_path / "run")
    params = checkpoint.open_run(tmp_path / "run", packed=True).items["params"]
    stored = np.asarray(params["shared"]["embedding"]).tobytes()
    files = [path for path in (tmp_path / "run/checkpoints/0/params").rglob("*") if path.is_file()]
    (file,) = [path for path in files if stored in path.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(stored) + len(stored) // 2] ^= 1
    file.write_bytes(content)
    (report,) = verify(tmp_path / "run/checkpoints")
    assert report["damaged"]


@pytest.mark.parametrize(
    "weights, dtype, expected",
    [
        *(("auto", "auto", "float32"), ("auto", "bfloat16", "bfloat16"), ("int8", "bfloat16", "bfloat16")),
        *(("bfloat16", "auto", "float32"), ("float32", "auto", "float32")),
    ],
)
def test_weights_in_fewer_bytes_keep_the_dtype_of_computing(weights: str, dtype: str, expected: str) -> None:
    """The default dtype of a CPU is float32."""
    assert dtype_of(Config(decode=DecodeConfig(weights=weights, dtype=dtype))) == jnp.dtype(expected)
