"""Conversion refuses input in one line that names file and tensor or key, and writes nothing."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from pipejax.config import T5Config
from pipejax.convert import huggingface
from support.refusals import refuses

CONFIG = T5Config(
    vocab_size=50,
    d_model=16,
    d_kv=4,
    d_ff=24,
    num_heads=3,
    num_layers=2,
    num_decoder_layers=2,
    feed_forward="gated-gelu",
    tied_head=False,
    scale_head=False,
)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 891646390\n"
TOKENIZER = "source: found tokenizer files that cannot be read ("
EOS = "config.json: eos_token_id:"
SIZES = {"V": 50, "D": 16, "F": 24, "B": 32, "H": 3, "I": 12}
DENSE = "encoder.block.1.layer.1.DenseReluDense"
WO = f"{DENSE}.wo.weight"  # [16, 24]
BIAS = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"  # as in umT5


def random_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {path: [SIZES[axis] for axis in axes] for path, (_, axes) in CONFIG.tensors().items()}
    flat = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    return unflatten_dict(flat, sep="/")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A valid v1.1 directory."""
    huggingface.write_hf(CONFIG, random_params(), tmp_path / "source", None)
    return tmp_path / "source"


def setting(**changes: Any) -> Callable[[Path], None]:
    """Sets keys of config.json; `...` removes one."""

    def change(directory: Path) -> None:
        facts = json.loads((directory / "config.json").read_text()) | changes
        facts = {key: value for key, value in facts.items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(facts))

    return change


def put(name: str, array: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors") | {name: np.asarray(array)}
        save_file(tensors, directory / "model.safetensors")

    return change


def drop(start: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        kept = {name: array for name, array in tensors.items() if not name.startswith(start)}
        save_file(kept, directory / "model.safetensors")

    return change


def prefixed(directory: Path, prefix: str, **more: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({prefix + name: array for name, array in tensors.items()} | more, directory / "model.safetensors")


def content(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_bytes(data)


def rename(name: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / "model.safetensors").rename(directory / name)


def shards(**changes: str) -> Callable[[Path], None]:
    """Writes the tensors to one shard, and an index with changes."""

    def change(directory: Path) -> None:
        names = load_file(directory / "model.safetensors")
        rename("shard.safetensors")(directory)
        places = dict.fromkeys(names, "shard.safetensors") | changes
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return change


def generation(text: str | None) -> Callable[[Path], None]:
    """Writes generation_config.json; None removes it."""

    def change(directory: Path) -> None:
        file = directory / "generation_config.json"
        file.write_text(text) if text is not None else file.unlink()

    return change


def both(*changes: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        for one in changes:
            one(directory)

    return change


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def clear(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


REFUSALS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "missing tensor": (drop(WO), ("model.safetensors: ", f"{WO}: missing", "52", "51")),
    "no embedding": (drop("shared"), ("model.safetensors: ", "shared.weight: missing")),
    "extra tensor": (put("classifier.weight", ones(3)), ("model.safetensors: ", "classifier.weight: found")),
    "bias in each block": (put(BIAS, ones(32, 3)), (f"{BIAS}: found",)),
    "shape": (put(WO, ones(16, 25)), ("model.safetensors", WO, "[16, 25]", "[16, 24]", "d_ff 24")),
    "transposed": (put(WO, ones(24, 16)), (WO, "found shape [24, 16]; expected [16, 24]")),
    "axes": (put(WO, ones(384)), (WO, "[384]", "[16, 24]")),
    "integers": (put(WO, np.ones((16, 24), np.int8)), ("model.safetensors: ", WO, "I8", "F32")),
    "nan": (put(WO, ones(16, 24) * np.nan), ("model.safetensors: ", WO, "384 values", "NaN")),
    "infinite": (put("lm_head.weight", ones(50, 16) * np.inf), ("lm_head.weight", "800 values", "infinite")),
    "nan in an alias": (put("decoder.embed_tokens.weight", ones(50, 16) * np.nan), ("decoder.embed", "NaN")),
    "two embeddings": (put("encoder.embed_tokens.weight", ones(50, 16)), ("encoder.embed", "shared.weight")),
    "encoder alone": (drop("decoder"), ("model.safetensors", "T5EncoderModel", "decoder")),
    "no tensors": (drop(""), ("model.safetensors", "0 tensors")),
    "factors of lora": (
        put("base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight", ones(2, 16)),
        ("q.lora_A.weight: found 1 LoRA factors",),
    ),
    "factors with their adapter's name": (put("decoder.q.lora_B.default.weight", ones(2, 16)), ("LoRA factors",)),
    "twice, once wrapped": (put(f"_orig_mod.{WO}", ones(16, 24)), (f"{WO}: found twice, as _orig_mod.{WO} and {WO}",)),
    "more than a T5, wrapped": (lambda d: prefixed(d, "model.", loss=ones(3)), (".safetensors: loss: ",)),
    "encoder alone, wrapped": (both(drop("decoder"), lambda d: prefixed(d, "module.")), ("T5EncoderModel",)),
    "truncated": (truncate, ("model.safetensors", "damaged")),
    "bin": (rename("last.bin"), ("last.bin", "safetensors")),
    "not torch's": (rename("pytorch_model.bin"), ("pytorch_model.bin: found a damaged file",)),
    "no weights": (rename("weights"), ("no weights", "model.safetensors")),
    "index goes up": (shards(x="../shard.safetensors"), ("index.json", "'../shard.safetensors'")),
    "absent shard": (shards(x="y.safetensors"), ("index.json", "y.safetensors", "x")),
    "not in its shard": (shards(x="shard.safetensors"), ("shard.safetensors: x: missing",)),
    "other model": (setting(model_type="bart"), ("model_type: found 'bart'; expected t5 or mt5 or umt5",)),
    "model type a list": (setting(model_type=["t5"]), ("config.json", "model_type", "['t5']")),
    "no model type": (setting(model_type=...), ("config.json", "model_type: missing")),
    "no d_model": (setting(d_model=...), ("shared.weight", "[50, 16]", "d_model 512")),
    "text d_ff": (setting(d_ff="24"), ("config.json", "d_ff", "'24'", "a whole number")),
    "true layers": (setting(num_layers=True), ("config.json", "num_layers", "True")),
    "negative heads": (setting(num_heads=-3), ("config.json: num_heads: found -3; expected at least 1",)),
    "null vocabulary": (setting(vocab_size=None), ("config.json: vocab_size: found null; expected a whole",)),
    "nan epsilon": (setting(layer_norm_epsilon=float("nan")), ("config.json", "layer_norm_epsilon", "nan")),
    "eos too large": (both(generation(None), setting(eos_token_id=50)), (f"source/{EOS} found 50", "vocab_size = 50")),
    "no eos in a list": (
        both(generation(None), setting(eos_token_id=[])),
        (f"source/{EOS} found an empty list",),
    ),
    "two eos in generation_config, one too large": (
        generation('{"eos_token_id": [1, 50]}'),
        (f"generation_{EOS} found 50; expected ids from 0 to below",),
    ),
    "two starts": (generation('{"decoder_start_token_id": [0, 3]}'), ("decoder_start_token_id: found [0, 3]",)),
    "eos of generation_config too large": (generation('{"eos_token_id": 50}'), (f"generation_{EOS} found 50", "= 50")),
    "an eos in words": (generation('{"eos_token_id": "</s>"}'), (f"generation_{EOS} found '</s>'; expected a whole",)),
    "text tie": (setting(tie_word_embeddings="no", scale_decoder_outputs=...), ("tie_word", "'no'")),
    "text tie beside a scale": (setting(tie_word_embeddings="no"), ("tie_word_embeddings: found 'no'; expected true",)),
    "activation": (
        setting(feed_forward_proj="gated-tanh", dense_act_fn=...),
        ("_proj: found 'gated-tanh'", "gated-gelu"),
    ),
    "activation list": (setting(feed_forward_proj=["relu"]), ("feed_forward_proj: found ['relu']",)),
    "other gelu": (setting(dense_act_fn="gelu"), ("config.json: dense_act_fn: found 'gelu'", "'gelu_new'")),
    "lies on gating": (
        setting(feed_forward_proj="relu", dense_act_fn=..., is_gated_act=...),
        ("config.json: feed_forward_proj: found relu; expected gated-gelu", "wi_0.weight"),
    ),
    "lies on d_model": (setting(d_model=18), ("model.safetensors: shared.weight", "[50, 16]", "d_model 18")),
    "lies on vocab_size": (setting(vocab_size=60), ("shared.weight", "[50, 16]", "vocab_size 60")),
    "lies on d_ff": (setting(d_ff=32), ("DenseReluDense.wi_0.weight", "[24, 16]", "d_ff 32")),
    "lies on d_kv": (setting(d_kv=8), ("SelfAttention.q.weight", "[12, 16]", "num_heads * d_kv 24")),
    "lies on heads": (setting(num_heads=6, d_kv=2), ("relative_attention_bias", "[32, 3]", "num_heads 6")),
    "lies on buckets": (setting(relative_attention_num_buckets=16), ("[32, 3]", "_num_buckets 16")),
    "too few layers": (setting(num_layers=1), ("config.json: num_layers: found 1; expected 2", "encoder")),
    "too many layers": (setting(num_layers=1000), ("num_layers: found 1000; expected 2",)),
    "no machine's layers": (setting(num_layers=10**9), ("num_layers: found 1000000000; expected at most 1024",)),
    "a number too long": (setting(layer_norm_epsilon=10**400), ("layer_norm_epsilon: found a number of more than 30",)),
    "too many decoder layers": (setting(num_decoder_layers=3), ("num_decoder_layers: found 3; expected 2",)),
    "no config": (lambda d: (d / "config.json").unlink(), ("found no config.json; expected a directory",)),
    "config no json": (content("config.json", b"{'d_model': 3}"), ("config.json: found no JSON",)),
    "config a list": (content("config.json", b"[]"), ("config.json: found []",)),
    "generation no json": (content("generation_config.json", b"{"), ("generation_config.json: found no",)),
    "nothing": (clear, ("config.json",)),
    "an adapter": (both(clear, content("adapter_config.json", b"{}")), (".json: base_model_name_or_path: found None",)),
    "an adapter of an adapter": (
        both(clear, lambda d: content("adapter_config.json", b'{"base_model_name_or_path": "%s"}' % bytes(d))(d)),
        ("source: found a LoRA adapter",),
    ),
    "a training's directory": (
        both(clear, lambda d: (d / "checkpoint-9").mkdir(), content("checkpoint-9/config.json", b"{}")),
        ("source: found no config.json, but one in its checkpoint-9",),
    ),
    "config a pointer": (content("config.json", LFS), ("source/config.json: found a git-LFS pointer",)),
    "generation_config a pointer": (content("generation_config.json", LFS), ("config.json: found a git-LFS pointer",)),
    "weights a pointer": (content("model.safetensors", LFS), ("source/model.safetensors: found a git-LFS pointer",)),
    "our own": (lambda directory: (directory / "checkpoints").mkdir(), ("source: found a checkpoint of pipejax",)),
    "tokenizer too large": (
        lambda directory: transformers.ByT5Tokenizer().save_pretrained(directory),
        ("source: found a tokenizer of 384 ids", "at most 50", "vocab_size"),
    ),
    "broken tokenizer": (content("tokenizer.json", b"{"), (TOKENIZER, "tokenizer.json is not JSON")),
    "tokenizer a pointer": (content("tokenizer.json", LFS), (TOKENIZER, "tokenizer.json is a git-LFS pointer")),
    "spiece a pointer": (content("spiece.model", LFS), (TOKENIZER, "spiece.model is a git-LFS pointer")),
    "spiece damaged": (content("spiece.model", b"junk"), (TOKENIZER, "spiece.model is damaged")),
    "spiece damaged, with a class": (
        both(content("spiece.model", b"junk"), content("tokenizer_config.json", b'{"tokenizer_class": "T5Tokenizer"}')),
        (TOKENIZER, "spiece.model is damaged"),
    ),
    "spiece a web page": (content("spiece.model", b"<html><body>404"), (TOKENIZER, "spiece.model is a web page")),
    "a class without its vocabulary": (
        content("tokenizer_config.json", b'{"tokenizer_class": "T5Tokenizer"}'),
        ("source: found no vocabulary; expected",),
    ),
    "a tokenizer of nothing": (content("tokenizer.json", b"{}"), (TOKENIZER,)),
    "tokenizer_config a pointer": (
        both(content("tokenizer_config.json", LFS), content("tokenizer.json", b"{}")),
        (TOKENIZER, "tokenizer_config.json is a git-LFS pointer"),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_damaged_source_is_refused_in_one_line(
    case: str,
    source: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    damage, words = REFUSALS[case]
    damage(source)
    with refuses("", *words) as refused:
        huggingface.from_hf(source, tmp_path / "out")
    said = str(refused.value) + capfd.readouterr().err
    assert str(scratch) not in said and "tiktoken" not in said.lower()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "path, change, words",
    [
        ("encoder/norm/scale", None, "encoder/norm/scale: missing"),
        ("decoder/extra", ones(3), "decoder/extra: not in the config"),
        ("encoder/norm/scale", ones(3), "encoder/norm/scale: found shape [3]; expected [16]"),
        ("lm_head/kernel", ones(16, 50) * np.nan, "lm_head/kernel: found 800 values that are NaN"),
    ],
)
def test_bad_parameters_are_not_exported(path: str, change: Any, words: str, tmp_path: Path) -> None:
    flat = flatten_dict(random_params(), sep="/") | {path: change}
    params = unflatten_dict({name: array for name, array in flat.items() if array is not None}, sep="/")
    with refuses(f"parameters: {path}", words) as refused:
        huggingface.write_hf(CONFIG, params, tmp_path / "out", None)
    assert str(refused.value).startswith("parameters: ") and not list(tmp_path.iterdir())
