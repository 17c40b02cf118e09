"""Adapters of PEFT are read and written; PEFT's own library is the reference."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from pipejax import checkpoint
from pipejax.convert import from_hf, peft_adapters, read_hf, to_hf
from pipejax.convert.__main__ import main as convert_main
from pipejax.system.cli import run
from pipejax.system.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # required by PEFT

SOURCE, TARGET = [[3, 4, 5, 6, 49, 1]], [[0, 7, 8, 9]]
SIZES: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 3, "num_layers": 2}
PATTERNS = {
    "rank_pattern": {r"SelfAttention\.q": 3, "wi_1": 2},
    "alpha_pattern": {r"block\.1\..*\.v": 5.0},
    "exclude_modules": ["block.0.layer.0.SelfAttention.q"],
}
KINDS: dict[str, dict[str, Any]] = {
    "names": {"r": 2, "lora_alpha": 6, "target_modules": ["q", "v"]},
    "an expression": {"r": 4, "lora_alpha": 4, "target_modules": r"decoder\..*(EncDecAttention|SelfAttention)\.(k|o)"},
    "all, by the root": {"r": 4, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {"r": 4, "lora_alpha": 8, "target_modules": ["q", "v", "wi_1"], **PATTERNS},
}


@functools.cache
def peft() -> Any:
    """Imports PEFT for the first test that needs it, since the import takes seconds."""
    return pytest.importorskip("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> Path:
    """A T5 v1.1 with a separate head."""
    torch.manual_seed(0)
    settings = {**SIZES, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))
    directory: Path = tmp_path_factory.mktemp("base") / "t5"
    model.save_pretrained(directory)
    return directory


def whole(base: Path) -> Any:
    return transformers.T5ForConditionalGeneration.from_pretrained(base)


def adapt(base: Path, out: Path, settings: dict[str, Any], **saving: Any) -> np.ndarray:
    """Trains an adapter by PEFT for some updates, saves it, and returns its logits."""
    torch.manual_seed(1)
    model = peft().get_peft_model(whole(base), peft().LoraConfig(task_type="SEQ_2_SEQ_LM", **settings))
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.requires_grad], 0.05)
    for step in range(4):
        labels = torch.tensor([[10 + step, 11, 12, 1]])
        model(input_ids=torch.tensor(SOURCE), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out, **saving)
    return theirs(model)


def theirs(model: Any) -> np.ndarray:
    model.eval()
    with torch.no_grad():
        found = model(input_ids=torch.tensor(SOURCE), decoder_input_ids=torch.tensor(TARGET)).logits
    return found.numpy()


def ours(directory: Path) -> np.ndarray:
    """The logits of a checkpoint whose factors are merged."""
    restored = checkpoint.open_run(directory)
    assert restored.config.model is not None
    source, target = jnp.asarray(SOURCE), jnp.asarray(TARGET)
    causal = jnp.tril(jnp.ones((4, 4), bool))[None]
    given = source, source > -1, target, causal, jnp.arange(4)[None]
    return np.asarray(restored.config.model.module().apply({"params": restored.items["params"]}, *given))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "patterns" else pytest.mark.slow) for kind in KINDS]
)
def test_peft_adapter_round_trip_keeps_logits(kind: str, base: Path, tmp_path: Path) -> None:
    expected = adapt(base, tmp_path / "adapter", KINDS[kind])
    assert np.abs(expected - theirs(whole(base))).max() > 0.1
    from_hf(tmp_path / "adapter", tmp_path / "run")
    np.testing.assert_allclose(ours(tmp_path / "run"), expected, atol=1e-4)
    stored = checkpoint.open_run(tmp_path / "run", apart=True).items["params"]
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert sum("lora_" in path for path in flatten_dict(stored, sep="/")) == len(tensors)

    to_hf(tmp_path / "run", tmp_path / "back", adapter=True, base_model=str(base))
    again = peft().PeftModel.from_pretrained(whole(base), tmp_path / "back")
    np.testing.assert_allclose(theirs(again), expected, atol=1e-4)
    by_transformers = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back")
    np.testing.assert_allclose(theirs(by_transformers), expected, atol=1e-4)


def test_adapter_in_a_torch_file_with_a_base_by_name_is_read(base: Path, tmp_path: Path, capsys: Any) -> None:
    expected = adapt(base, tmp_path / "adapter", KINDS["names"])
    tensors = {name: torch.tensor(x) for name, x in load_file(tmp_path / "adapter/adapter_model.safetensors").items()}
    torch.save(tensors, tmp_path / "adapter/adapter_model.bin")
    (tmp_path / "adapter/adapter_model.safetensors").unlink()
    change(base_model_name_or_path="nowhere/t5")(tmp_path / "adapter")
    arguments = ["from-hf", str(tmp_path / "adapter"), str(tmp_path / "run"), "--base-model", str(base)]
    assert convert_main(arguments) == 0
    assert f"adapter: a LoRA adapter, which is saved with the weights of {base}" in capsys.readouterr().err
    np.testing.assert_allclose(ours(tmp_path / "run"), expected, atol=1e-4)


def change(**changes: Any) -> Any:
    def write(directory: Path) -> None:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return write


def put(name: str, shape: tuple[int, ...]) -> Any:
    def write(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        save_file(load_file(file) | {name: np.ones(shape, np.float32)}, file)

    return write


Q = "base_model.model.decoder.block.0.layer.0.SelfAttention.q"
SLOW = r"(\w+\.?)+!"
FAULTS: dict[str, tuple[Any, str]] = {
    "dora": (change(use_dora=True), "adapter_config.json: use_dora: found True"),
    "loha": (change(peft_type="LOHA"), "peft_type: found 'LOHA'; expected LORA"),
    "bias": (change(bias="all"), "bias: found 'all'"),
    "modules_to_save": (change(modules_to_save=["lm_head"]), "modules_to_save: found ['lm_head']"),
    "a changed base": (change(init_lora_weights="pissa"), "init_lora_weights: found 'pissa'; expected True or"),
    "another changed base": (change(init_lora_weights="pissa_niter_4"), "init_lora_weights: found 'pissa_niter_4'"),
    "a base by gradients": (change(init_lora_weights="lora_ga"), "init_lora_weights: found 'lora_ga'; expected"),
    "a base of residuals": (change(init_lora_weights="olora"), "init_lora_weights: found 'olora'; expected"),
    "layer 0 alone": (change(layers_to_transform=0), "layers_to_transform: found 0"),
    "a bias": (change(lora_bias=True), "lora_bias: found True"),
    "tokens": (change(trainable_token_indices=[0]), "trainable_token_indices: found [0]"),
    "a revision of nothing": (change(base_model_name_or_path="a/b", revision=3), "revision: found 3; expected a name"),
    "a rank in parts": (change(r=2.5), "r: found 2.5; expected a whole number above 0"),
    "a slow expression": (change(target_modules=SLOW), r"target_modules: found '(\\w+\\.?)+!'"),
    "a slow exception": (change(exclude_modules=SLOW), r"exclude_modules: found '(\\w+\\.?)+!'"),
    "a slow pattern": (change(rank_pattern={SLOW: 3}), "another expression took more than 0.5 s"),
    "a long expression": (change(alpha_pattern={"q" * 70000: 3}), "expressions of 70,009 characters; expected at most"),
    "a deep expression": (change(target_modules="(" * 5000 + "a" + ")" * 5000), "expected a regular expression"),
    "an expression that is none": (change(rank_pattern={"q)": 3}), "rank_pattern: q)"),
    "a number as a target": (change(target_modules=3), "target_modules: found 3; expected a list of names"),
    "a number in targets": (change(target_modules=["q", 3]), "target_modules: found ['q', 3]; expected a list"),
    "a new key": (change(use_marvels=True), "use_marvels: found True"),
    "no rank": (change(r=0), "r: found 0; expected a whole number above 0"),
    "no alpha": (change(lora_alpha=None), "lora_alpha: found None; expected a number above 0"),
    "a pattern's rank": (change(rank_pattern={"q": "3"}), "rank_pattern: q: found '3'; expected a whole number"),
    "no expression": (change(target_modules="q)"), "target_modules: found 'q)' (unbalanced parenthesis"),
    "no target": (change(target_modules=None), "target_modules: found none"),
    "other targets": (change(target_modules=["q", "v", "k"]), "k.lora_A.weight: missing; expected shape [2, 16]"),
    "fewer targets": (change(target_modules=["q"]), "v.lora_A.weight: found"),
    "another rank": (change(r=3), "q.lora_A.weight: found shape [2, 16]; expected shape [3, 16]"),
    "a head": (put("base_model.model.lm_head.lora_A.weight", (2, 16)), "lm_head.lora_A.weight: found"),
    "another size": (
        put(f"{Q}.lora_B.weight", (13, 2)),
        "q.lora_B.weight: found shape [13, 2]; expected shape [12, 2]",
    ),
    "no base": (change(base_model_name_or_path=None), "base_model_name_or_path: found None; expected a name"),
    "no weights": (lambda d: (d / "adapter_model.safetensors").unlink(), "found no weights; expected one of adapter"),
    "a stray file": (lambda d: (d / "adapter_config.json").unlink(), "adapter: found no config.json"),
}


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: Any) -> Path:
    place: Path = tmp_path_factory.mktemp("adapter") / "adapter"
    adapt(base, place, KINDS["names"])
    return place


PLAIN: dict[str, dict[str, Any]] = {
    "orthogonal": {"init_lora_weights": "orthogonal", "revision": "v1.0"},
    "minor components": {"init_lora_weights": "mica", "revision": ""},
    "drawn": {"init_lora_weights": False, "lora_dropout": 0.3, "inference_mode": False, "revision": None},
    "nothing more": {"corda_config": None, "loftq_config": {}, "task_type": None, "bias": "none", "eva_config": {}},
    "turned": {"fan_in_fan_out": True, "auto_mapping": {"a": 1}},
    "no layers": {"layers_to_transform": [], "modules_to_save": [], "trainable_token_indices": {}},
    "a pattern with its dot": {
        "rank_pattern": {".*none": 3},
        "target_modules": ["SelfAttention.q", "EncDecAttention.q", "v"],
    },
    "an expression": {"target_modules": r"(?!.*wi).*\.(q|v)", "exclude_modules": r"nothing.*"},
    "lists of ends": {"target_modules": ["q", "v", "k"], "exclude_modules": ["k", "tention.q", "ayer.0"]},
    "other scales": {"lora_alpha": 3.5, "use_rslora": True, "alpha_pattern": {"q": 1, r"\.q": 9, "v": 2}},
}


@pytest.mark.filterwarnings("ignore")  # PEFT's warning that it does not follow some of these
@pytest.mark.parametrize("kind", PLAIN)
def test_fields_that_leave_lora_plain_are_accepted(kind: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    """The merged matrices equal PEFT's."""
    shutil.copytree(adapter, tmp_path / "adapter")
    change(**PLAIN[kind])(tmp_path / "adapter")
    merged = peft().PeftModel.from_pretrained(whole(base), tmp_path / "adapter").merge_and_unload().state_dict()
    model, params = read_hf(base)
    flat, factors = flatten_dict(params, sep="/"), peft_adapters.read_factors(tmp_path / "adapter", model)
    assert sum(path.endswith("lora_a") for path in factors) == 2 * 2 + 2 * 4
    for path, (name, _) in model.tensors().items():
        if path.endswith("kernel"):
            stem, array = path.removesuffix("/kernel"), flat[path]
            if f"{stem}/lora_a" in factors:
                array = array + factors[f"{stem}/lora_a"] @ factors[f"{stem}/lora_b"]
            np.testing.assert_allclose(array, merged[name].numpy().T, atol=1e-5)


def test_base_of_an_adapter_has_the_revision_of_the_adapter(base: Path, tmp_path: Path) -> None:
    for given, expected in (
        ({"revision": "v2"}, "some/t5@v2"),
        ({"revision": "main"}, "some/t5"),
        ({"revision": None}, "some/t5"),
        ({}, "some/t5"),
        ({"revision": "v2", "base_model_name_or_path": str(base)}, str(base)),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/t5"} | given))
        assert peft_adapters.base_of(tmp_path) == expected


@pytest.mark.parametrize("fault", FAULTS)
def test_unsupported_adapter_raises_one_line(
    fault: str, adapter: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "slow" in fault:
        monkeypatch.setattr(peft_adapters, "SECONDS", 0.5)
    for file in adapter.iterdir():
        (tmp_path / "adapter").mkdir(exist_ok=True)
        (tmp_path / "adapter" / file.name).write_bytes(file.read_bytes())
    spoil, words = FAULTS[fault]
    spoil(tmp_path / "adapter")
    with pytest.raises(SystemExit) as left:
        run(convert_main, ["from-hf", str(tmp_path / "adapter"), str(tmp_path / "out")])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert left.value.code == 2 and len(errors) == 1 and words in errors[0], errors
    assert not (tmp_path / "out").exists()


def test_directory_without_adapter_has_no_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    from_hf(base, tmp_path / "plain")
    from_hf(adapter, tmp_path / "adapted")
    given: list[tuple[str, dict[str, Any], str]] = [
        ("plain", {"base_model": str(base)}, "found no factors; expected a run with train.lora_rank"),
        ("adapted", {}, "--adapter: found no --base-model"),
    ]
    for name, settings, words in given:
        with pytest.raises(UserError, match=words):
            to_hf(tmp_path / name, tmp_path / "out", adapter=True, **settings)
    with pytest.raises(UserError, match=r"found no adapter_config.json, so this is not a LoRA adapter; expected an"):
        from_hf(base, tmp_path / "out", base_model=str(base))
    other = whole(base)
    torch.nn.init.zeros_(other.encoder.block[0].layer[0].SelfAttention.q.weight)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"other: encoder/.*: found"):
        to_hf(tmp_path / "adapted", tmp_path / "out", adapter=True, base_model=str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()
