"""Conversion from and to Hugging Face, compared with transformers; test_convert_refusals.py tests refusals."""

import errno
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flax.serialization import msgpack_serialize
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from pipejax import checkpoint
from pipejax.convert import huggingface
from pipejax.convert.__main__ import main as convert_main
from pipejax.model import t5_config
from pipejax.model.t5_config import T5Config
from pipejax.system.cli import run
from pipejax.system.errors import UserError

Models = dict[str, tuple[Any, Path]]  # the model and its directory, by kind

DIMENSIONS = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 3, "num_layers": 2}
UNTIED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SMALL = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9}
KINDS: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5 v1.1": {**UNTIED, "own_head": True},
    "t5 v1.1 tied": UNTIED,
    "byt5": {**UNTIED, "num_layers": 3, "num_decoder_layers": 1, "own_head": True},
    "own head scaled": {"feed_forward_proj": "gated-silu", "num_decoder_layers": 3, "own_head": True},
    "mt5": {"model_type": "mt5", "own_head": True},
    "mt5 tied": {"model_type": "mt5", **SMALL},
}


def new_model(*, model_type: str = "t5", own_head: bool = False, **settings: Any) -> Any:
    """A model with Hugging Face's initialisation."""
    torch.manual_seed(0)
    settings = {**DIMENSIONS, "decoder_start_token_id": 0, **settings}
    if model_type == "mt5":
        model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**settings))
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))
    if own_head:  # transformers 5 ties every new model; only a checkpoint with two tables gets two
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    return model.eval()


def save(model: Any, directory: Path, **options: Any) -> Path:
    """Saves by save_pretrained, with a separate head if the model has one."""
    if model.lm_head.weight is not model.shared.weight:
        model.all_tied_weights_keys.pop("lm_head.weight", None)
    model.save_pretrained(directory, **options)
    return directory


def load(directory: Path) -> Any:
    """Loads by transformers, which must find exactly its tensors."""
    model, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    source, target = torch.tensor([[3, 4, 5, 6, 49, 1]]), torch.tensor([[0, 7, 8, 9]])
    with torch.no_grad():
        return model(input_ids=source, decoder_input_ids=target).logits


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether paths and bits are equal."""
    one, two = flatten_dict(found), flatten_dict(expected)
    return one.keys() == two.keys() and all(
        one[path].dtype == two[path].dtype and np.array_equal(one[path], two[path]) for path in one
    )


def edit_config(directory: Path, **changes: Any) -> None:
    """Sets keys of config.json; `...` removes one."""
    facts = json.loads((directory / "config.json").read_text()) | changes
    facts = {key: value for key, value in facts.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(facts))


def edit_tensors(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = tensors_of(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models that no test changes."""
    root = tmp_path_factory.mktemp("models")
    built = {kind: new_model(**settings) for kind, settings in KINDS.items()}
    return {kind: (model, save(model, root / kind)) for kind, model in built.items()}


@pytest.fixture
def source(models: Models, tmp_path: Path) -> Path:
    """A v1.1 directory for a single test."""
    return Path(shutil.copytree(models["t5 v1.1"][1], tmp_path / "source"))


@pytest.mark.parametrize("kind", KINDS)
def test_written_model_equals_the_model_that_was_read(kind: str, models: Models, tmp_path: Path) -> None:
    model, directory = models[kind]
    config, params = huggingface.read_hf(directory)
    assert isinstance(config, T5Config)
    assert config.tied_head == ("own_head" not in KINDS[kind])
    assert config.scale_head == (kind in ("t5", "own head scaled"))
    flat = flatten_dict(params, sep="/")
    assert flat.keys() == config.tensors().keys()
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in flat.values())
    huggingface.write_hf(config, params, tmp_path / "out", None)
    assert equal(tensors_of(tmp_path / "out"), tensors_of(directory))
    assert huggingface.read_hf(tmp_path / "out")[0] == config
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_tensors_have_the_right_paths_and_orientation(models: Models) -> None:
    model, directory = models["byt5"]
    params = flatten_dict(huggingface.read_hf(directory)[1], sep="/")
    _, cross, dense = model.decoder.block[0].layer
    attention = model.encoder.block[2].layer[0].SelfAttention
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    for path, expected in {
        "shared/embedding": model.shared.weight,
        "lm_head/kernel": model.lm_head.weight.T,
        "decoder/layers_0/cross_attention/query/kernel": cross.EncDecAttention.q.weight.T,
        "decoder/layers_0/cross_attention/norm/scale": cross.layer_norm.weight,
        "decoder/layers_0/feed_forward/wi_1/kernel": dense.DenseReluDense.wi_1.weight.T,
        "encoder/layers_2/attention/output/kernel": attention.o.weight.T,
        "encoder/relative_bias/embedding": bias.weight,
    }.items():
        assert np.array_equal(params[path], expected.detach().numpy()), path


@pytest.mark.parametrize("model_type", ["t5", "mt5"])
@pytest.mark.parametrize("head", ["none", "own", "copy"])
def test_head_and_scale_equal_transformers(model_type: str, head: str, tmp_path: Path) -> None:
    model = new_model(model_type=model_type, own_head=head == "own", num_layers=1)
    directory = save(model, tmp_path / "source")
    if head == "copy":
        edit_tensors(directory, lambda t: t.update({"lm_head.weight": t["shared.weight"].copy()}))
    for tied, scaled in itertools.product((..., False), (..., True, False)):
        edit_config(directory, tie_word_embeddings=tied, scale_decoder_outputs=scaled)
        theirs = load(directory)
        config, params = huggingface.read_hf(directory)
        assert isinstance(config, T5Config)
        out = tmp_path / f"{tied}-{scaled}"
        huggingface.write_hf(config, params, out, None)
        given = logits(theirs)
        assert torch.equal(logits(load(out)), given), (tied, scaled)
        assert config.tied_head == ("lm_head" not in params) == (head != "own")
        # If the model had scaling, it would give other logits without it.
        theirs.config.scale_decoder_outputs = False
        assert config.scale_head == (not torch.equal(logits(theirs), given)), (tied, scaled)


def test_old_config_of_the_hub_is_read(models: Models, tmp_path: Path) -> None:
    """The config of google-t5/t5-small has no feed_forward_proj, and has keys without a meaning."""
    directory = models["t5"][1]
    old = {
        "architectures": ["T5WithLMHeadModel"],
        "model_type": "t5",
        "n_positions": 512,
        "output_past": True,
        "task_specific_params": {"summarization": {"prefix": "x"}},
        "eos_token_id": 1,
        "pad_token_id": 0,
        "layer_norm_epsilon": 1e-06,
        "relative_attention_num_buckets": 32,
        **DIMENSIONS,
    }
    shutil.copy(directory / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps(old))
    (config, params), (expected, same) = huggingface.read_hf(tmp_path), huggingface.read_hf(directory)
    assert config == expected and equal(params, same)


def test_special_ids_and_generation_settings_are_converted(source: Path, tmp_path: Path) -> None:
    edit_config(source, pad_token_id=4, eos_token_id=[2], decoder_start_token_id=...)
    (source / "generation_config.json").write_text('{"decoder_start_token_id": 3}')
    config, params = huggingface.read_hf(source)
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (4, 2, 3)
    huggingface.write_hf(config, params, tmp_path / "out", None)
    found = load(tmp_path / "out").generate(torch.tensor([[5, 6, 2]]), max_new_tokens=5)
    assert found[0, 0] == 3
    (source / "generation_config.json").unlink()
    assert huggingface.read_hf(source)[0].decoder_start_token_id == 4


@pytest.mark.parametrize("kind", ["t5", "byt5"])
def test_sharded_model_equals_the_whole_model(kind: str, models: Models, tmp_path: Path) -> None:
    save(models[kind][0], tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    (config, params), (expected, same) = huggingface.read_hf(tmp_path), huggingface.read_hf(models[kind][1])
    assert config == expected and equal(params, same)


@pytest.mark.parametrize("kind", ["t5", "byt5", "mt5"])
def test_flax_weights_equal_safetensors(kind: str, models: Models, tmp_path: Path) -> None:
    directory = models[kind][1]
    tree = {}
    for name, array in tensors_of(directory).items():
        *stem, _ = name.split(".")
        table, norm = stem[-1] in ("shared", "relative_attention_bias"), stem[-1].endswith("layer_norm")
        leaf = "embedding" if table else "weight" if norm else "kernel"
        tree[(*stem, leaf)] = array.T.copy() if leaf == "kernel" else array
    (tmp_path / "flax_model.msgpack").write_bytes(msgpack_serialize(unflatten_dict(tree)))
    shutil.copy(directory / "config.json", tmp_path)
    (config, params), (expected, same) = huggingface.read_hf(tmp_path), huggingface.read_hf(directory)
    assert config == expected and equal(params, same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32(dtype: Any, tmp_path: Path) -> None:
    model = new_model(own_head=True).to(dtype)
    config, params = huggingface.read_hf(save(model, tmp_path / "half"))
    huggingface.write_hf(config, params, tmp_path / "out", None)
    expected = {name: tensor.float() for name, tensor in model.state_dict().items()}
    for name, array in tensors_of(tmp_path / "out").items():
        assert array.dtype == np.float32 and np.array_equal(array, expected[name].numpy())


@pytest.mark.parametrize("names", [("encoder",), ("decoder",), ("shared", "encoder", "decoder")])
def test_aliases_of_the_embedding_are_read(names: tuple[str, ...], source: Path) -> None:
    expected = huggingface.read_hf(source)

    def rename(tensors: dict[str, Any]) -> None:
        table = tensors.pop("shared.weight")
        for name in names:
            tensors["shared.weight" if name == "shared" else f"{name}.embed_tokens.weight"] = table.copy()

    edit_tensors(source, rename)
    config, params = huggingface.read_hf(source)
    assert config == expected[0] and equal(params, expected[1])


def test_the_unused_bias_of_old_files_is_dropped(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = huggingface.read_hf(source)[1]
    edit_tensors(source, lambda t: t.update({t5_config.UNUSED: np.ones((32, 3), np.float32)}))
    assert equal(huggingface.read_hf(source)[1], expected)
    assert t5_config.UNUSED in capsys.readouterr().err


WRAPPED: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "torch.compile of a part": lambda name: name.replace("decoder.", "decoder._orig_mod."),
    "DataParallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "peft, merged": lambda name: f"base_model.model.{name}",
    "Lightning": lambda name: f"model.{name}",
    "a module of one's own": lambda name: f"generator.t5.{name}",
    "FSDP and checkpointing": lambda name: re.sub(
        r"(block\.\d+)\.", r"\1._fsdp_wrapped_module._checkpoint_wrapped_module.", name
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrapper_prefixes_of_names_are_read(wrapper: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = huggingface.read_hf(source)
    assert "wrapper" not in capsys.readouterr().err
    renamed = {WRAPPED[wrapper](name): array for name, array in tensors_of(source).items()}
    count = len(renamed.keys() - tensors_of(source).keys())
    save_file(renamed, source / "model.safetensors", metadata={"format": "pt"})
    config, params = huggingface.read_hf(source)
    assert config == expected[0] and equal(params, expected[1])
    line = capsys.readouterr().err
    name = min(renamed.keys() & line.split())
    assert line.startswith(f"{source}/model.safetensors: wrappers changed the names of {count} tensors: {name} is")


# Whole conversions.


def test_round_trip_keeps_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = new_model(**(KINDS["byt5"] | {"vocab_size": 384}))
    directory, ours, theirs = save(model, tmp_path / "byt5-tiny"), tmp_path / "ours", tmp_path / "theirs"
    transformers.ByT5Tokenizer().save_pretrained(directory)  # the tokenizer that needs no vocabulary; 384 ids
    theirs.mkdir()  # an empty directory counts as absent
    sizes = [huggingface.from_hf(directory, ours)]
    config = checkpoint.open_run(ours).config
    assert (config.name, config.train.method) == ("byt5-tiny", "none")
    assert config.model == huggingface.read_hf(directory)[0]
    sizes.append(huggingface.to_hf(ours, theirs))
    tensors = tensors_of(directory)
    report = f"{sum(x.size for x in tensors.values()) / 1e6:.3f} million parameters in {len(tensors)} tensors"
    assert sizes == [report, report] and not capsys.readouterr().out
    carried = [directory / name for name in huggingface.TOKENIZER_FILES if (directory / name).is_file()]
    assert {file.name for file in carried} == {file.name for file in (ours / "tokenizer").iterdir()} != set()
    for file in carried:
        assert (ours / "tokenizer" / file.name).read_bytes() == file.read_bytes()
        assert (theirs / file.name).read_bytes() == file.read_bytes()
    assert torch.equal(logits(load(theirs)), logits(model))
    assert equal(tensors_of(theirs), tensors)
    assert transformers.AutoTokenizer.from_pretrained(theirs)("a").input_ids == [100, 1]


def command(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        run(convert_main, [str(argument) for argument in argv])
    return int(caught.value.code or 0)


def test_commands_convert_in_both_directions(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs, new = tmp_path / "ours", tmp_path / "theirs", tmp_path / "new"
    assert command("from-hf", source, ours) == 0
    assert command("to-hf", ours, theirs) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith(f"{theirs}: ") and "no tokenizer" in err
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for argv, words in (
        (("from-hf", source, ours), f"{ours}: found an existing file"),
        (("to-hf", ours, theirs), f"{theirs}: found an existing file"),
        (("from-hf", source, source / "config.json"), "found an existing file"),
        (("from-hf", source, source / "config.json" / "new"), "cannot be written"),
        (("to-hf", ours, source / "config.json" / "new"), "cannot be written"),
        (("to-hf", ours, new, "--best"), "found no best/"),
        (("to-hf", source, new), "found no checkpoints/"),
        (("from-hf", source / "config.json", new), "found a file"),
        (("from-hf", tmp_path / "nowhere", new), "neither a directory nor a reachable hub id (no such path)"),
        (("from-hf", "nobody/nothing", new), "nobody/nothing: found neither a directory nor"),
        (("from-hf",), "SRC"),
    ):
        assert command(*argv) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: ") and words in last, last
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing(
    error: BaseException, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    raised = UserError if isinstance(error, OSError) else KeyboardInterrupt
    monkeypatch.setattr("pipejax.checkpoint.run.write_text", fail)
    with pytest.raises(raised):
        huggingface.from_hf(source, tmp_path / "out")
    monkeypatch.setattr(huggingface, "save_file", fail)
    with pytest.raises(raised):
        huggingface.write_hf(*huggingface.read_hf(source), tmp_path / "out", None)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("flax", [False, True])
def test_a_hub_id_is_downloaded(flax: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, *, allow_patterns: str | list[str], local_files_only: bool = False) -> str:
        assert name == "somebody/some-t5" and not local_files_only
        asked.extend([allow_patterns] if isinstance(allow_patterns, str) else allow_patterns)
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    if flax:
        (source / "model.safetensors").unlink()
        with pytest.raises(UserError, match="no weights"):  # the flax file is simulated as well
            huggingface.from_hf("somebody/some-t5", "out")
    else:
        huggingface.from_hf("somebody/some-t5", "out")
        assert checkpoint.open_run("out").config.name == "some-t5"
    assert ("flax_model.msgpack" in asked) == flax
    assert not any(pattern in ("*", "*.bin", "pytorch_model.bin") for pattern in asked)
