"""Adapters of every backbone are exchanged with PEFT in both directions, without unmatched names."""

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from pipejax import checkpoint
from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.backbones.umt5 import UMT5Config
from pipejax.config import Config, DataConfig, TrainConfig
from pipejax.convert import from_hf, peft_adapters, to_hf
from pipejax.convert.huggingface import write_hf
from pipejax.model import lora
from pipejax.model.t5_config import T5Config
from pipejax.system.errors import UserError
from support import in_transformers
from support.in_transformers import VISION, config_facts, varied

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # required by PEFT
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),  # warnings about bases without a name, and about tied heads
]

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_heads": 3,
    "num_layers": 2,
    "num_decoder_layers": 2,
}
SIDE = GemmaStack(16, 24, 4, 2, 6, 6, 4)
BACKBONES: dict[str, Any] = {
    "t5": T5Config(**SIZES),
    "mt5": T5Config(**SIZES, feed_forward="gated-gelu", tied_head=False, scale_head=False),
    "umt5": UMT5Config(**SIZES, feed_forward="gated-gelu"),
    "t5gemma": T5GemmaConfig(SIDE, dataclasses.replace(SIDE, hidden_size=12), 50, 2, 2, decoder_start_token_id=0),
    "t5gemma2": T5Gemma2Config(
        dataclasses.replace(SIDE, attn_logit_softcapping=0.0),
        dataclasses.replace(SIDE, attn_logit_softcapping=0.0, num_key_value_heads=1),
        *(50, 2, 2),
        decoder_start_token_id=0,
    ),
}
T5, GEMMA = ("t5", "mt5", "umt5"), ("t5gemma", "t5gemma2")
OF_T5: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear"},
    "names": {"target_modules": ["q", "v"], "lora_alpha": 6},
    "ends": {"target_modules": ["SelfAttention.q", "1.layer.0.SelfAttention.v"], "use_rslora": True},
    "encoder": {"target_modules": r"encoder\..*\.(q|o|wo)"},
    "decoder": {"target_modules": r"decoder\..*(\.k|wo)", "lora_alpha": 3, "use_rslora": True},
    "cross": {"target_modules": r".*EncDecAttention\.[qkvo]"},
    "patterns": {
        "target_modules": ["q", "k", "wo"],
        "rank_pattern": {r"SelfAttention\.q": 3, r"encoder\..*\.wo": 1},
        "alpha_pattern": {r"block\.1\..*\.k": 5.0, "decoder.block.0.layer.1.EncDecAttention.q": 1.5},
        "exclude_modules": ["block.0.layer.0.SelfAttention.q"],
    },
    "excluded": {"target_modules": "all-linear", "exclude_modules": r"encoder\..*"},
}
OF_GEMMA: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear"},
    "names": {"target_modules": ["q_proj", "up_proj"], "lora_alpha": 6},
    "ends": {"target_modules": ["self_attn.v_proj", "1.mlp.down_proj"], "use_rslora": True},
    "encoder": {"target_modules": r"model\.encoder\..*layers.*\.(q_proj|gate_proj)"},
    "decoder": {"target_modules": r".*decoder\..*\.(k_proj|o_proj)", "lora_alpha": 3, "use_rslora": True},
    "cross": {"target_modules": r".*decoder.*(cross|self)_attn\.[kv]_proj"},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {r"self_attn\.q_proj": 3, r".*encoder\..*\.down_proj": 1},
        "alpha_pattern": {r"layers\.1\..*\.k_proj": 5.0, "model.decoder.layers.0.self_attn.q_proj": 1.5},
        "exclude_modules": r".*encoder.*layers\.0\.self_attn\.q_proj",
    },
    "excluded": {"target_modules": "all-linear", "exclude_modules": r"model\.decoder\..*"},
}
CASES = [
    pytest.param(kind, case, marks=() if kind == "t5gemma2" or case == "patterns" else pytest.mark.slow)
    for kinds, cases in ((T5, OF_T5), (GEMMA, OF_GEMMA))
    for kind in kinds
    for case in cases
]
QUICK = [("t5gemma2", "encoder"), ("t5gemma2", "everything"), ("umt5", "attention")]
SOURCE, TARGET = [[3, 4, 5, 6, 49, 1]], [[0, 7, 8, 9]]


@functools.cache
def peft() -> Any:
    """Imports PEFT for the first test that needs it, since the import takes seconds."""
    return pytest.importorskip("peft")


def params_of(kind: str) -> Any:
    return varied(BACKBONES[kind], 0, centered=kind in GEMMA)


def of_transformers(kind: str) -> Any:
    """The model of transformers with these parameters; T5Gemma 2 has an image encoder, like the published models."""
    return copy.deepcopy(original(kind))


@functools.cache
def original(kind: str) -> Any:
    """The model of `of_transformers`; tests must not change it."""
    model = BACKBONES[kind]
    facts = config_facts(model)
    if kind == "t5gemma2":
        facts["encoder"] |= {"vision_config": VISION, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model.facts()["model_type"], **facts)
    more = {"attn_implementation": "eager"} if kind == "t5gemma" else {}  # the only implementation with soft caps
    torchs = transformers.AutoModelForSeq2SeqLM.from_config(config, **more).eval()
    if not model.tied_head:  # otherwise the head is the table
        torchs.lm_head.weight = torch.nn.Parameter(torch.empty_like(torchs.lm_head.weight))
    state = in_transformers.tensors(model, params_of(kind))
    found = torchs.load_state_dict({model.module_name(name): x for name, x in state.items()}, strict=False)
    assert not found.unexpected_keys
    shared = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    tied = shared | {"lm_head.weight", "lm_head.out_proj.weight"} | {f"model.{name}" for name in shared}
    others = tied | {"model.decoder.embed_tokens.eoi_embedding"}
    assert not [name for name in found.missing_keys if name not in others and not name.startswith(model.image_tensors)]
    return torchs


def adapted(kind: str, settings: dict[str, Any]) -> Any:
    """This model with an adapter of random factors."""
    found = peft().get_peft_model(
        of_transformers(kind), peft().LoraConfig(task_type="SEQ_2_SEQ_LM", **{"r": 2, "lora_alpha": 4} | settings)
    )
    torch.manual_seed(1)
    for name, x in found.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(x, std=0.4)
    return found.eval()


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        found = model(input_ids=torch.tensor(SOURCE), decoder_input_ids=torch.tensor(TARGET)).logits
    return found.numpy()


def loaded(kind: str, tensors: Any, facts: Any) -> Any:
    """This model with an adapter of ours; PEFT must find a tensor for each place, and a place for each tensor."""
    model = peft().get_peft_model(of_transformers(kind), peft().LoraConfig(**facts)).eval()
    result = peft().set_peft_model_state_dict(model, {name: torch.from_numpy(x) for name, x in tensors.items()})
    assert not result.unexpected_keys
    assert not [name for name in result.missing_keys if "lora_" in name]
    places = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert len(places) == len(tensors) > 0
    return model


def check_matrices(kind: str, factors: Any, model: Any) -> int:
    """Compares merged matrices with PEFT's; returns the number of matrices that an adapter changes."""
    merged = {name: x.numpy() for name, x in model.merge_and_unload().state_dict().items()}
    flat, changed = flatten_dict(params_of(kind), sep="/"), 0
    for path, (name, _) in BACKBONES[kind].tensors().items():
        if path.endswith("kernel"):
            array, stem = flat[path], path.removesuffix("/kernel")
            if f"{stem}/{lora.A}" in factors:
                array, changed = array + factors[f"{stem}/{lora.A}"] @ factors[f"{stem}/{lora.B}"], changed + 1
            np.testing.assert_allclose(array, merged[BACKBONES[kind].module_name(name)].T, atol=1e-5)
    return changed


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_adapter_round_trip_matches_peft(kind: str, case: str, tmp_path: Any) -> None:
    torchs = adapted(kind, (OF_T5 if kind in T5 else OF_GEMMA)[case])
    expected = logits(torchs)
    assert np.abs(expected - logits(original(kind))).max() > 0.01
    torchs.save_pretrained(tmp_path)
    factors = peft_adapters.read_factors(tmp_path, BACKBONES[kind])
    written = [name for name in load_file(tmp_path / "adapter_model.safetensors") if "vision_tower" not in name]
    assert len(factors) == len(written)

    params = unflatten_dict(flatten_dict(params_of(kind), sep="/") | factors, sep="/")
    again = loaded(kind, *peft_adapters.to_peft(BACKBONES[kind], params, "some/base"))
    np.testing.assert_allclose(logits(again), expected, atol=1e-4)
    assert check_matrices(kind, factors, again) == len(factors) // 2


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        pytest.param(kind, part, marks=() if (kind, part) in QUICK else pytest.mark.slow)
        for kind in BACKBONES
        for part in ("encoder", "decoder", "attention", "everything")
    ],
)
def test_own_factors_load_in_peft(kind: str, part: str) -> None:
    """Factors are from our trainings of all layers, one stack (as with `train.freeze`), or one kind of layer."""
    is_trained = lambda path: part == "everything" or part in path  # noqa: E731
    params = lora.add(params_of(kind), 3, jax.random.key(0), is_trained)
    flat = {path: np.asarray(x) for path, x in flatten_dict(params, sep="/").items()}
    rng = np.random.default_rng(1)
    flat |= {path: 0.1 * rng.standard_normal(x.shape, np.float32) for path, x in flat.items() if path.endswith(lora.B)}
    tensors, facts = peft_adapters.to_peft(BACKBONES[kind], unflatten_dict(flat, sep="/"), "some/base")
    factors = {path: x for path, x in flat.items() if lora.is_factor(path)}
    assert check_matrices(kind, factors, loaded(kind, tensors, facts)) == len(factors) // 2 == len(tensors) // 2


def test_factors_of_the_image_encoder_are_left_out_and_reported(tmp_path: Any, capsys: Any) -> None:
    adapted("t5gemma2", {"target_modules": ["k_proj"]}).save_pretrained(tmp_path)
    assert len(peft_adapters.read_factors(tmp_path, BACKBONES["t5gemma2"])) == 2 * 4
    line = (
        f"{tmp_path}/adapter_model.safetensors: left out 2 factors of the vision tower, because sources are text only"
    )
    assert capsys.readouterr().err.splitlines() == [line]


def test_an_adapter_of_images_alone_is_refused(tmp_path: Any) -> None:
    adapted("t5gemma2", {"target_modules": r".*vision_tower.*\.k_proj"}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"adapter_model.safetensors: found no factors"):
        peft_adapters.read_factors(tmp_path, BACKBONES["t5gemma2"])


@pytest.mark.parametrize("target", ["names", "encoder", "all"])
def test_names_of_an_earlier_release_of_transformers_are_read(target: str, tmp_path: Any, capsys: Any) -> None:
    """In this release the encoder's modules had the names in the files."""
    settings = dict(OF_GEMMA[target])
    if target == "encoder":
        settings["target_modules"] = r"model\.encoder\.text_model\.layers.*\.(q_proj|gate_proj)"
    torchs = adapted("t5gemma2", settings)
    torchs.save_pretrained(tmp_path)
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    save_file({name.replace(".text_model.", "."): x for name, x in load_file(file).items()}, file)
    config.write_text(config.read_text().replace(r"text_model\\.", ""))
    factors = peft_adapters.read_factors(tmp_path, BACKBONES["t5gemma2"])
    assert check_matrices("t5gemma2", factors, torchs) == len(factors) // 2
    line = f"{file}: its modules have names of an earlier release of transformers; PEFT may skip modules"
    assert capsys.readouterr().err.count(line) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a head": ({"target_modules": ["q", "lm_head"]}, r"lm_head\.\w+.weight: found"),
    "a table": ({"target_modules": ["q", "shared"]}, "shared.lora_embedding_A: found"),
    "a whole head": (
        {"target_modules": ["q"], "modules_to_save": ["lm_head"]},
        "modules_to_save: found",
    ),
    "some layers": ({"target_modules": ["q"], "layers_to_transform": [0]}, r"layers_to_transform: found \[0\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_factors_outside_supported_modules_are_refused(case: str, tmp_path: Any) -> None:
    settings, expected = REFUSED[case]
    adapted("mt5", settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=expected):
        peft_adapters.read_factors(tmp_path, BACKBONES["mt5"])


def ours(params: Any, kind: str) -> np.ndarray:
    source, target = jnp.asarray(SOURCE), jnp.asarray(TARGET)
    causal = jnp.tril(jnp.ones((4, 4), bool))[None]
    given = source, source > -1, target, causal, jnp.arange(4)[None]
    return np.asarray(BACKBONES[kind].module().apply({"params": params}, *given))


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKBONES)
def test_logits_equal_torch(kind: str, tmp_path: Any) -> None:
    for case, settings in (OF_T5 if kind in T5 else OF_GEMMA).items():
        torchs = adapted(kind, settings)
        torchs.save_pretrained(tmp_path / case)
        factors = peft_adapters.read_factors(tmp_path / case, BACKBONES[kind])
        params = lora.merge_factors(unflatten_dict(flatten_dict(params_of(kind), sep="/") | factors, sep="/"))
        np.testing.assert_allclose(ours(params, kind), logits(torchs), atol=1e-4, err_msg=case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKBONES)
def test_adapter_directories_round_trip(kind: str, tmp_path: Any) -> None:
    """PEFT's directory becomes a run, and this run a directory that transformers loads, with the base's files."""
    if kind == "t5gemma2":
        of_transformers(kind).save_pretrained(tmp_path / "base")  # with its image encoder, which `write_hf` lacks
    else:
        write_hf(BACKBONES[kind], params_of(kind), tmp_path / "base", None)
    torchs = adapted(kind, {"target_modules": "all-linear"})
    torchs.save_pretrained(tmp_path / "adapter")
    expected, base = logits(torchs), str(tmp_path / "base")
    from_hf(tmp_path / "adapter", tmp_path / "run", base_model=base)
    run = checkpoint.open_run(tmp_path / "run")
    np.testing.assert_allclose(ours(run.items["params"], kind), expected, atol=1e-4)
    to_hf(tmp_path / "run", tmp_path / "back", adapter=True, base_model=base)
    again = peft().PeftModel.from_pretrained(of_transformers(kind), tmp_path / "back")
    np.testing.assert_allclose(logits(again), expected, atol=1e-4)
    more = {"attn_implementation": "eager"} if kind == "t5gemma" else {}
    by_transformers = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back", **more)
    np.testing.assert_allclose(logits(by_transformers), expected, atol=1e-4)


def test_factors_of_different_ranks_are_written_as_rank_pattern() -> None:
    """The most frequent rank is `r`, and others are patterns that PEFT resolves to the same modules."""
    flat, rng = flatten_dict(params_of("t5gemma2"), sep="/"), np.random.default_rng(0)
    ranks = {"encoder/layers_0/attention/query": 1, "encoder/layers_1/attention/query": 4}
    ranks |= {f"decoder/layers_{i}/feed_forward/wo": 2 for i in range(2)}
    for stem, rank in ranks.items():
        width, features = flat[f"{stem}/kernel"].shape
        flat[f"{stem}/{lora.A}"] = rng.standard_normal((width, rank), np.float32)
        flat[f"{stem}/{lora.B}"] = rng.standard_normal((rank, features), np.float32)
    tensors, facts = peft_adapters.to_peft(BACKBONES["t5gemma2"], unflatten_dict(flat, sep="/"), "some/base")
    assert facts["r"] == 2 and facts["rank_pattern"] == facts["alpha_pattern"] == {
        f"model.encoder.text_model.layers.{i}.self_attn.q_proj": rank for i, rank in ((0, 1), (1, 4))
    }
    assert check_matrices("t5gemma2", flat, loaded("t5gemma2", tensors, facts)) == 4


def test_config_of_a_run_names_no_image_module() -> None:
    config = Config(model=BACKBONES["t5gemma2"], data=DataConfig(task="none"), train=TrainConfig(lora_rank=1))
    assert config.model is not None
    params = lora.add(params_of("t5gemma2"), 1, jax.random.key(0))
    _, facts = peft_adapters.to_peft(config.model, params, "some/base")
    targets = facts["target_modules"]
    assert isinstance(targets, list) and len(targets) == 2 * 2 * 7
    torchs = of_transformers("t5gemma2")
    images = [name for name, _ in torchs.named_modules() if "vision_tower" in name]
    assert not [name for name in images if any(f".{name}".endswith(f".{target}") for target in targets)]
