"""Conversion from and to Hugging Face: what is read, what is refused, and that transformers agrees."""

import errno
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from pipejax import checkpoint, convert
from pipejax.cli import run
from pipejax.config import T5Config
from pipejax.errors import UserError

DIMENSIONS = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 3, "num_layers": 2}
UNTIED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
KINDS: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5 v1.1": {**UNTIED, "own_head": True},
    "t5 v1.1 tied": UNTIED,
    "byt5": {**UNTIED, "num_layers": 3, "num_decoder_layers": 1, "own_head": True},
    "own head scaled": {"feed_forward_proj": "gated-silu", "num_decoder_layers": 3, "own_head": True},
    "mt5": {"model_type": "mt5", "own_head": True},
    "mt5 tied": {"model_type": "mt5", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 9},
}
BLOCK = "encoder.block.1.layer"
BYTES = transformers.ByT5Tokenizer  # the one tokenizer that needs no vocabulary file; 384 ids


def new_model(*, model_type: str = "t5", own_head: bool = False, **settings: Any) -> Any:
    """A model with Hugging Face's initialisation."""
    torch.manual_seed(len(str(settings)))
    settings = {**DIMENSIONS, "decoder_start_token_id": 0, **settings}
    if model_type == "mt5":
        model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**settings))
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))
    if own_head:  # transformers 5 ties every new model; only a checkpoint with two tables gets two
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    return model.eval()


def save(model: Any, directory: Path, **options: Any) -> Path:
    """Writes what save_pretrained does, and the head of its own that it takes for a tied one."""
    own = model.lm_head.weight is not model.shared.weight
    model.all_tied_weights_keys = {name: source for name, source in model.all_tied_weights_keys.items()
                                   if not (own and name == "lm_head.weight")}
    model.save_pretrained(directory, **options)
    return directory


def load(directory: Path) -> Any:
    """Through transformers, which must find exactly the tensors that it wants."""
    model, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    source, target = torch.tensor([[3, 4, 5, 6, 49, 1]]), torch.tensor([[0, 7, 8, 9]])
    with torch.no_grad():
        return model(input_ids=source, decoder_input_ids=target).logits


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Same paths, same bits."""
    one, two = flatten_dict(found), flatten_dict(expected)
    return one.keys() == two.keys() and all(
        one[path].dtype == two[path].dtype and np.array_equal(one[path], two[path]) for path in one)


def edit_config(directory: Path, **changes: Any) -> None:
    """Sets keys of config.json; `...` removes one."""
    facts = json.loads((directory / "config.json").read_text()) | changes
    facts = {key: value for key, value in facts.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(facts))


def edit_tensors(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Of each kind a model and its directory; nobody changes them."""
    root = tmp_path_factory.mktemp("models")
    built = {kind: new_model(**settings) for kind, settings in KINDS.items()}
    return {kind: (model, save(model, root / kind)) for kind, model in built.items()}


@pytest.fixture
def source(models: dict[str, tuple[Any, Path]], tmp_path: Path) -> Path:
    """A v1.1 directory of one's own."""
    return Path(shutil.copytree(models["t5 v1.1"][1], tmp_path / "source"))


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    model, directory = models[kind]
    config, params = convert.read_hf(directory)
    assert config.tied_head == ("own_head" not in KINDS[kind])
    assert config.scale_head == (kind in ("t5", "own head scaled"))
    assert flatten_dict(params, sep="/").keys() == convert.mapping(config).keys()
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in flatten_dict(params).values())
    convert.write_hf(config, params, tmp_path / "out", None)
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), load_file(directory / "model.safetensors"))
    assert convert.read_hf(tmp_path / "out")[0] == config
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_paths_and_orientation(models: dict[str, tuple[Any, Path]]) -> None:
    model, directory = models["byt5"]
    _, params = convert.read_hf(directory)
    block = model.decoder.block[0].layer
    for found, expected in (
        (params["shared"]["embedding"], model.shared.weight),
        (params["lm_head"]["kernel"], model.lm_head.weight.T),
        (params["decoder"]["layers_0"]["cross_attention"]["query"]["kernel"], block[1].EncDecAttention.q.weight.T),
        (params["decoder"]["layers_0"]["cross_attention"]["norm"]["scale"], block[1].layer_norm.weight),
        (params["decoder"]["layers_0"]["feed_forward"]["wi_1"]["kernel"], block[2].DenseReluDense.wi_1.weight.T),
        (params["encoder"]["layers_2"]["attention"]["output"]["kernel"],
         model.encoder.block[2].layer[0].SelfAttention.o.weight.T),
        (params["encoder"]["relative_bias"]["embedding"],
         model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight),
    ):
        assert np.array_equal(found, expected.detach().numpy())


@pytest.mark.parametrize("model_type", ["t5", "mt5"])
@pytest.mark.parametrize("head", ["none", "own", "copy"])
def test_head_and_scale_are_those_of_transformers(model_type: str, head: str, tmp_path: Path) -> None:
    model = new_model(model_type=model_type, own_head=head == "own", num_layers=1)
    directory = save(model, tmp_path / "source")
    if head == "copy":
        edit_tensors(directory, lambda t: t.update({"lm_head.weight": t["shared.weight"].copy()}))
    for tied, scaled in itertools.product((..., True, False), (..., True, False)):
        edit_config(directory, tie_word_embeddings=tied, scale_decoder_outputs=scaled)
        theirs = load(directory)
        width = DIMENSIONS["d_model"]
        theirs.lm_head.weight = torch.nn.Parameter(torch.ones(1, width))  # logits = sum of what the head is given
        given = logits(theirs).sum()
        theirs.config.scale_decoder_outputs = False
        scales = not torch.allclose(logits(theirs).sum(), given)
        config, params = convert.read_hf(directory)
        assert config.scale_head == scales, (tied, scaled)
        assert config.tied_head == ("lm_head" not in params) == (head != "own")
        out = tmp_path / f"{tied}-{scaled}"
        convert.write_hf(config, params, out, None)
        assert torch.equal(logits(load(out)), logits(load(directory))), (tied, scaled)


def test_old_config_of_the_hub(models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """As of google-t5/t5-small: no feed_forward_proj, no num_decoder_layers, and keys that mean nothing now."""
    model, directory = models["t5"]
    shutil.copytree(directory, tmp_path / "old")
    old = {"architectures": ["T5WithLMHeadModel"], "model_type": "t5", "n_positions": 512, "output_past": True,
           "task_specific_params": {"summarization": {"prefix": "summarize: "}}, "eos_token_id": 1, **DIMENSIONS,
           "pad_token_id": 0, "layer_norm_epsilon": 1e-06, "relative_attention_num_buckets": 32}
    (tmp_path / "old" / "config.json").write_text("\ufeff" + json.dumps(old))
    (tmp_path / "old" / "generation_config.json").unlink()
    config, params = convert.read_hf(tmp_path / "old")
    assert config == T5Config(**DIMENSIONS, num_decoder_layers=2)
    assert equal(params, convert.read_hf(directory)[1])


def test_special_ids_and_generation(source: Path, tmp_path: Path) -> None:
    edit_config(source, pad_token_id=4, eos_token_id=[2], decoder_start_token_id=...)
    (source / "generation_config.json").write_text('{"decoder_start_token_id": 3}')
    config, params = convert.read_hf(source)
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (4, 2, 3)
    convert.write_hf(config, params, tmp_path / "out", None)
    found = load(tmp_path / "out").generate(torch.tensor([[5, 6, 2]]), max_new_tokens=5, num_beams=2)
    assert found[0, 0] == 3
    (source / "generation_config.json").unlink()
    assert convert.read_hf(source)[0].decoder_start_token_id == 4


@pytest.mark.parametrize("kind", ["t5", "byt5"])
def test_shards(kind: str, models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    save(models[kind][0], tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    (config, params), (expected, whole) = convert.read_hf(tmp_path), convert.read_hf(models[kind][1])
    assert config == expected and equal(params, whole)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["t5", "byt5", "mt5"])
def test_flax(kind: str, wrapped: bool, models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    directory = models[kind][1]
    tree = {}
    for name, array in load_file(directory / "model.safetensors").items():
        *stem, _ = name.split(".")
        table = stem[-1] in ("shared", "relative_attention_bias")
        leaf = "embedding" if table else "weight" if stem[-1].endswith("layer_norm") else "kernel"
        tree[(*stem, leaf)] = array.T.copy() if leaf == "kernel" else array
    nested: dict[str, Any] = unflatten_dict(tree)
    content = flax.serialization.msgpack_serialize({"params": nested} if wrapped else nested)
    (tmp_path / "flax_model.msgpack").write_bytes(content)
    shutil.copy(directory / "config.json", tmp_path)
    (config, params), (expected, whole) = convert.read_hf(tmp_path), convert.read_hf(directory)
    assert config == expected and equal(params, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32(dtype: Any, tmp_path: Path) -> None:
    model = new_model(own_head=True).to(dtype)
    config, params = convert.read_hf(save(model, tmp_path / "half"))
    convert.write_hf(config, params, tmp_path / "out", None)
    expected = {name: tensor.float() for name, tensor in model.state_dict().items()}
    for name, array in load_file(tmp_path / "out" / "model.safetensors").items():
        assert array.dtype == np.float32 and np.array_equal(array, expected[name].numpy())


@pytest.mark.parametrize("names", [("encoder",), ("decoder",), ("shared", "encoder", "decoder")])
def test_embedding_aliases(names: tuple[str, ...], source: Path) -> None:
    expected = convert.read_hf(source)

    def rename(tensors: dict[str, Any]) -> None:
        table = tensors.pop("shared.weight")
        for name in names:
            tensors["shared.weight" if name == "shared" else f"{name}.embed_tokens.weight"] = table.copy()

    edit_tensors(source, rename)
    config, params = convert.read_hf(source)
    assert config == expected[0] and equal(params, expected[1])


def test_the_unused_bias_of_old_files_is_dropped(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = convert.read_hf(source)[1]
    edit_tensors(source, lambda t: t.update({convert.UNUSED: np.ones((32, 3), np.float32)}))
    assert equal(convert.read_hf(source)[1], expected)
    assert convert.UNUSED in capsys.readouterr().err


# Refusals.


def put(name: str, array: Any) -> Callable[[Path], None]:
    return lambda d: edit_tensors(d, lambda t: t.update({name: np.asarray(array)}))


def drop(start: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]
    return lambda d: edit_tensors(d, change)


def setting(**changes: Any) -> Callable[[Path], None]:
    return lambda d: edit_config(d, **changes)


def content(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda d: (d / name).write_bytes(data)


def truncate(d: Path) -> None:
    file = d / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def instead(name: str, data: bytes = b"") -> Callable[[Path], None]:
    """Puts another file in the place of model.safetensors."""
    def change(d: Path) -> None:
        (d / "model.safetensors").unlink()
        (d / name).write_bytes(data)
    return change


def shards(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """Splits the tensors over a.safetensors and b.safetensors, and changes the index."""
    def split(d: Path) -> None:
        tensors = load_file(d / "model.safetensors")
        (d / "model.safetensors").unlink()
        places = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(sorted(tensors))}
        for shard in "ab":
            save_file({n: t for n, t in tensors.items() if places[n][0] == shard}, d / f"{shard}.safetensors")
        places = change(places) or places
        (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return split


NAN = np.full((16, 24), np.nan, np.float32)
WO = f"{BLOCK}.1.DenseReluDense.wo.weight"
REFUSALS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "missing tensor": (drop(WO), ("model.safetensors", WO, "missing", "51", "50")),
    "no embedding": (drop("shared"), ("model.safetensors", "shared.weight", "missing")),
    "extra tensor": (put("classifier.weight", np.ones(3, "f")), ("model.safetensors", "classifier.weight")),
    "bias in each block": (put(f"{BLOCK}.0.SelfAttention.relative_attention_bias.weight", np.ones((32, 3), "f")),
                           (f"{BLOCK}.0.SelfAttention.relative_attention_bias.weight", "without a place")),
    "shape": (put(WO, np.ones((16, 25), "f")), ("model.safetensors", WO, "[16, 25]", "[16, 24]", "d_ff 24")),
    "axes": (put(WO, np.ones(384, "f")), (WO, "[384]", "[16, 24]")),
    "integers": (put(WO, np.ones((16, 24), np.int8)), ("model.safetensors", WO, "I8", "F32")),
    "float64": (put(WO, np.ones((16, 24))), ("model.safetensors", WO, "F64")),
    "nan": (put(WO, NAN), ("model.safetensors", WO, "384 values", "NaN")),
    "infinite": (put("lm_head.weight", np.full((50, 16), np.inf, "f")), ("lm_head.weight", "infinite")),
    "nan in an alias": (put("decoder.embed_tokens.weight", np.full((50, 16), np.nan, "f")),
                        ("decoder.embed_tokens.weight", "NaN")),
    "two embeddings": (put("encoder.embed_tokens.weight", np.ones((50, 16), "f")),
                       ("encoder.embed_tokens.weight", "shared.weight")),
    "encoder alone": (drop("decoder"), ("model.safetensors", "T5EncoderModel", "decoder")),
    "no tensors": (drop(""), ("model.safetensors", "0 tensors")),
    "truncated": (truncate, ("model.safetensors", "damaged")),
    "empty file": (content("model.safetensors", b""), ("model.safetensors", "damaged")),
    "pointer": (content("model.safetensors", b"version https://git-lfs.github.com/spec/v1"), ("damaged",)),
    "bin": (instead("pytorch_model.bin"), ("pytorch_model.bin", "safetensors")),
    "no weights": (instead("model.ckpt"), ("no weights", "model.safetensors")),
    "broken msgpack": (instead("flax_model.msgpack", b"\x93\x01"), ("flax_model.msgpack", "damaged")),
    "empty msgpack": (instead("flax_model.msgpack"), ("flax_model.msgpack", "damaged")),
    "msgpack of a number": (instead("flax_model.msgpack", b"\x01"), ("flax_model.msgpack", "damaged")),
    "msgpack leaf": (instead("flax_model.msgpack", b"\x81\xa1a\x01"), ("flax_model.msgpack", "a:", "int")),
    "index without map": (instead("model.safetensors.index.json", b"{}"), ("index.json", "weight_map")),
    "index of a number": (shards(lambda p: p.update({WO: 3})), ("index.json", "weight_map")),
    "index no json": (instead("model.safetensors.index.json", b"{"), ("index.json", "JSON")),
    "index goes up": (shards(lambda p: p.update({WO: "../a.safetensors"})), ("index.json", "'../a.safetensors'")),
    "index absolute": (shards(lambda p: p.update({WO: "/etc/passwd"})), ("index.json", "'/etc/passwd'")),
    "absent shard": (shards(lambda p: p.update({WO: "c.safetensors"})), ("index.json", "c.safetensors", WO)),
    "not in its shard": (shards(lambda p: p.update(more="a.safetensors")), ("a.safetensors", "more: missing")),
    "not in the index": (shards(lambda p: {k: v for k, v in p.items() if k != WO}), (WO, "not listed")),
    "other model": (setting(model_type="umt5"), ("config.json", "model_type", "umt5", "mt5")),
    "model type a list": (setting(model_type=["t5"]), ("config.json", "model_type", "['t5']")),
    "no model type": (setting(model_type=...), ("config.json", "model_type: missing")),
    "no d_model": (setting(d_model=...), ("config.json", "d_model: missing")),
    "text d_ff": (setting(d_ff="24"), ("config.json", "d_ff", "'24'", "a whole number")),
    "true layers": (setting(num_layers=True), ("config.json", "num_layers", "True")),
    "negative heads": (setting(num_heads=-3), ("config.json", ": num_heads: found -3; expected at least 1")),
    "null vocabulary": (setting(vocab_size=None), ("config.json", "vocab_size", "None")),
    "nan epsilon": (setting(layer_norm_epsilon=float("nan")), ("config.json", "layer_norm_epsilon", "nan")),
    "eos too large": (setting(eos_token_id=50), ("config.json", "eos_token_id", "50", "vocab_size = 50")),
    "two eos": (setting(eos_token_id=[1, 2]), ("config.json", "eos_token_id", "[1, 2]")),
    "text tie": (setting(tie_word_embeddings="no", scale_decoder_outputs=...), ("tie_word_embeddings", "'no'")),
    "activation": (setting(feed_forward_proj="gated-tanh"), ("feed_forward_proj", "'gated-tanh'", "gated-gelu")),
    "activation list": (setting(feed_forward_proj=["relu"]), ("config.json", "feed_forward_proj", "['relu']")),
    "other gelu": (setting(dense_act_fn="gelu"), ("config.json", "dense_act_fn", "'gelu'", "'gelu_new'")),
    "lies on gating": (setting(feed_forward_proj="relu", dense_act_fn=..., is_gated_act=...),
                       ("config.json", "feed_forward_proj: found relu; expected gated-gelu", "wi_0.weight")),
    "lies on d_model": (setting(d_model=18), ("model.safetensors", "shared.weight", "[50, 16]", "d_model 18")),
    "lies on vocab_size": (setting(vocab_size=60), ("shared.weight", "[50, 16]", "vocab_size 60")),
    "lies on d_ff": (setting(d_ff=32), ("DenseReluDense.wi_0.weight", "[24, 16]", "d_ff 32")),
    "lies on d_kv": (setting(d_kv=8), ("SelfAttention.q.weight", "[12, 16]", "num_heads * d_kv 24")),
    "lies on num_heads": (setting(num_heads=6, d_kv=2), ("relative_attention_bias", "[32, 3]", "num_heads 6")),
    "lies on buckets": (setting(relative_attention_num_buckets=16),
                        ("[32, 3]", "relative_attention_num_buckets 16")),
    "too few layers": (setting(num_layers=1), ("config.json", " num_layers: found 1; expected 2", "encoder")),
    "too many layers": (setting(num_layers=10**9), ("config.json", " num_layers: found 1000000000; expected 2")),
    "too many decoder layers": (setting(num_decoder_layers=3), ("num_decoder_layers: found 3; expected 2",)),
    "no config": (lambda d: (d / "config.json").unlink(), ("config.json", "cannot be read")),
    "config no json": (content("config.json", b"{'d_model': 3}"), ("config.json", "JSON")),
    "config not utf-8": (content("config.json", b'{"\xff": 3}'), ("config.json", "JSON")),
    "config a list": (content("config.json", b"[]"), ("config.json", "[]")),
    "nothing": (lambda d: [file.unlink() for file in d.iterdir()], ("config.json",)),
    "tokenizer too large": (lambda d: BYTES().save_pretrained(d), ("a tokenizer of 384 ids", "at most 50")),
    "broken tokenizer": (content("tokenizer.json", b"{"), ("tokenizer",)),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line(case: str, source: Path, tmp_path: Path) -> None:
    damage, words = REFUSALS[case]
    damage(source)
    with pytest.raises(UserError) as caught:
        convert.from_hf(source, tmp_path / "out")
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("path, change, words", [
    ("encoder/norm/scale", None, "encoder/norm/scale: missing"),
    ("decoder/extra", np.ones(3, np.float32), "decoder/extra: found one too many"),
    ("encoder/norm/scale", np.ones(3, np.float32), "encoder/norm/scale: found shape [3]; expected [16]"),
    ("lm_head/kernel", np.full((16, 50), np.nan, np.float32), "lm_head/kernel: found 800 values that are NaN"),
])
def test_bad_parameters_are_not_exported(path: str, change: Any, words: str, source: Path, tmp_path: Path) -> None:
    config, params = convert.read_hf(source)
    flat = flatten_dict(params, sep="/") | {path: change}
    flat = {name: array for name, array in flat.items() if array is not None}
    with pytest.raises(UserError, match=r"^parameters: ") as caught:
        convert.write_hf(config, unflatten_dict(flat, sep="/"), tmp_path / "out", None)
    assert words in str(caught.value) and not (tmp_path / "out").exists()


# Whole conversions.


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = new_model(**(KINDS["byt5"] | {"vocab_size": 384}))
    directory, ours, theirs = save(model, tmp_path / "byt5-tiny"), tmp_path / "ours", tmp_path / "theirs"
    BYTES().save_pretrained(directory)
    theirs.mkdir()  # empty is as good as absent
    convert.from_hf(directory, ours)
    config = checkpoint.open_run(ours).config
    assert (config.name, config.train.objective, config.model) == (
        "byt5-tiny", "none", convert.read_hf(directory)[0])
    convert.to_hf(ours, theirs)
    assert capsys.readouterr().out.splitlines() == [f"{out}: 0.022 million parameters in 51 tensors"
                                                    for out in (ours, theirs)]
    for name in ("tokenizer_config.json", "added_tokens.json"):
        if (directory / name).exists():
            assert (ours / "tokenizer" / name).read_bytes() == (directory / name).read_bytes()
            assert (theirs / name).read_bytes() == (directory / name).read_bytes()
    assert torch.equal(logits(load(theirs)), logits(model))
    assert equal(load_file(theirs / "model.safetensors"), load_file(directory / "model.safetensors"))
    assert transformers.AutoTokenizer.from_pretrained(theirs)("a").input_ids == [100, 1]


def command(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        run(convert.main, [str(argument) for argument in argv])
    return int(caught.value.code or 0)


def test_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert command("from-hf", source, ours) == 0
    assert command("to-hf", ours, theirs) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith(f"{theirs}: ") and "no tokenizer" in err
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for argv, words in (
        (("from-hf", source, ours), f"{ours}: found something there"),
        (("to-hf", ours, theirs), f"{theirs}: found something there"),
        (("from-hf", source, source / "config.json"), "found something there"),
        (("to-hf", ours, tmp_path / "b", "--best"), "found no best/"),
        (("to-hf", source, tmp_path / "b"), "found no checkpoints/"),
        (("from-hf", source / "config.json", tmp_path / "b"), "found a file"),
        (("from-hf", tmp_path / "nowhere", tmp_path / "b"), "neither a directory nor a reachable hub id"),
        (("from-hf", "nobody/nothing", tmp_path / "b"), "nobody/nothing: found neither a directory nor"),
        (("from-hf", source, source / "config.json" / "b"), "cannot be written"),
        (("from-hf",), "SRC"),
    ):
        assert command(*argv) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: ") and words in last, last
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing(error: BaseException, source: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    raised = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(raised):
        patch.setattr(checkpoint, "write_text", fail)
        convert.from_hf(source, tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(raised):
        patch.setattr(convert, "save_file", fail)
        convert.write_hf(*convert.read_hf(source), tmp_path / "out", None)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("weights", ["model.safetensors", "flax_model.msgpack"])
def test_a_hub_id_is_downloaded(weights: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: str | list[str]) -> str:
        assert name == "somebody/some-t5"
        asked.append([allow_patterns] if isinstance(allow_patterns, str) else allow_patterns)
        return str(source)

    if weights != "model.safetensors":
        (source / "model.safetensors").rename(source / "x")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    if weights == "model.safetensors":
        convert.from_hf("somebody/some-t5", "out")
        assert checkpoint.open_run("out").config.name == "some-t5"
    else:
        with pytest.raises(UserError, match="no weights"):
            convert.from_hf("somebody/some-t5", "out")
    assert ("flax_model.msgpack" in sum(asked, [])) == (weights == "flax_model.msgpack")
    assert not any(pattern.endswith(".bin") or pattern == "*" for pattern in sum(asked, []))
