"""Custom backbones, and a T5 with a changed layer: decoding equals the teacher-forced module."""

import dataclasses
import importlib
import logging
import re
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

import pipejax
from pipejax import checkpoint, moved
from pipejax import config as config_lib
from pipejax.apps.hub.push_command import main as push
from pipejax.apps.picture.record_picture import main as picture
from pipejax.apps.serving.answer import Request
from pipejax.apps.serving.engine import Engine
from pipejax.apps.verify.checkpoint_command import main as verify
from pipejax.backbones.umt5 import UMT5Config
from pipejax.config import Config, DecodeConfig, GridConfig, T5Config
from pipejax.convert.__main__ import main as convert
from pipejax.convert.huggingface import read_hf, write_hf
from pipejax.inference import backends
from pipejax.inference.backends import Backend, Xla
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source
from pipejax.model import attention, embedding, layers, relative_bias, stack, t5
from pipejax.system.errors import UserError
from pipejax.training.run_directory import resolve_model
from pipejax.training.step import Trainer
from support import oracle
from support.in_transformers import varied
from support.refusals import refuses
from support.tiny import FEW_WORDS, RUN, change

GRID = GridConfig(delay=2, time_max=14, sub_max=4)
ROOT = Path(__file__).resolve().parent.parent
MOST = 64  # the tokens of a teacher-forced pass
BOTH = ("pipelined", "sequential")
TINY = UMT5Config(
    **{
        **vars(FEW_WORDS),
        "d_model": 16,
        "num_layers": 2,
        "feed_forward": "gated-gelu",
        "tied_head": False,
        "scale_head": False,
    }
)


def sources(count: int, vocabulary: int = FEW_WORDS.vocab_size) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [[*rng.integers(2, vocabulary, rng.integers(2, 9)).tolist(), 1] for _ in range(count)]


class TeacherForced:
    """The greedy choices of a module for `oracle.algorithm1`, from all rows again at every step."""

    def __init__(self, model: Any, params: Any, delay: int) -> None:
        self.delay, self.margin = delay, np.inf
        self.source: list[int] = []
        self.logits = jax.jit(lambda *given: model.apply({"params": params}, *given))

    def __call__(self, rows: list[list[int]]) -> list[int]:
        cells = oracle.coordinates(rows, self.delay)
        mask, tokens, position = np.zeros((1, MOST, MOST), bool), np.zeros((1, MOST), int), np.zeros((1, MOST), int)
        mask[0, : len(cells), : len(cells)] = oracle.visibility(cells)
        tokens[0, : len(cells)] = [token for row in rows for token in row]
        position[0, : len(cells)] = [row + time for row, time in cells]
        source, real = np.zeros((1, 12), int), np.arange(12)[None] < len(self.source)
        source[0, : len(self.source)] = self.source
        logits = np.asarray(self.logits(source, real, tokens, mask, position))[0]
        chosen = []
        for row, last in zip(rows, np.cumsum([len(row) for row in rows]) - 1, strict=True):
            chosen.append(int(logits[last].argmax()))
            if row[-1] != 1:
                self.margin = min(self.margin, oracle.margin(logits[last]))
        return chosen

    def rows(self, source: list[int], strategy: str) -> list[list[int]]:
        self.source, self.margin = source, np.inf
        if strategy == "pipelined":
            found = oracle.algorithm1(
                self, delay=GRID.delay, time_max=GRID.time_max, sub_max=GRID.sub_max, stop="empty_row"
            )
            return found.rows
        tokens = [0]
        while len(tokens) <= 20 and tokens[-1] != 1:
            tokens += self([tokens])
        return [[token for token in tokens[1:] if token != 1]]


def patched(self: Any, x: Any, cache: Any, *given: Any) -> Any:
    """A decoder layer that adds something to its result."""
    found, cache = ORIGINAL(self, x, cache, *given)
    return found + 2.0 * jnp.sin(3.0 * x), cache


ORIGINAL = t5.DecoderLayer.__call__


def check_answers(
    generator: Generator, forced: TeacherForced, given: list[list[int]], strategy: str, *, briefly: bool = False
) -> None:
    """Compares answers alone, in batches with and without drafts, and in a running batch; briefly: only in batches."""
    expected = [forced.rows(source, strategy) for source in given]
    sure = []
    for source in given:
        forced.rows(source, strategy)
        sure.append(forced.margin > 1e-4)
    assert sum(sure) > 0.8 * len(given) and len({str(rows) for rows in expected}) > 5
    found: list[list[Any]] = [generator.decode(given, method=strategy, batch_size=4)]
    if not briefly:
        found.append(generator.decode(given, method=strategy, batch_size=1))
        found.append(generator.decode(given, method=strategy, draft="source", batch_size=4))
        engine = Engine(generator, places=3, queue=100)
        answers = [engine.submit(Request(Source(i, ids), strategy)) for i, ids in enumerate(given)]
        found.append([list(answer.events())[-1] for answer in answers])
        engine.close(drain=True, seconds=60)
    for records in found:
        for record, rows, certain in zip(records, expected, sure, strict=True):
            assert not certain or record["row_ids"] == rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, briefly",
    [
        ("pipelined", True),  # tested in all ways for a UMT5 below
        pytest.param("pipelined", False, marks=pytest.mark.long),
        pytest.param("sequential", False, marks=pytest.mark.long),
    ],
)
def test_a_changed_layer_decodes_as_the_teacher_forced_module(strategy, briefly, monkeypatch, caplog):
    monkeypatch.setattr(t5.DecoderLayer, "__call__", patched)
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(1))
    config = Config(model=FEW_WORDS, grid=GRID, decode=DecodeConfig(max_length=20, draft_tokens=3))
    generator = Generator(config, params, None)
    forced = TeacherForced(t5.T5(FEW_WORDS), params, GRID.delay)
    with caplog.at_level(logging.INFO, "pipejax"):
        check_answers(generator, forced, sources(20), strategy, briefly=briefly)
    assert caplog.text.count("which is modified, layer by layer") == 1
    monkeypatch.undo()
    stock = Generator(config, params, None).decode(sources(20), method=strategy, batch_size=4)
    assert [record["row_ids"] for record in stock] != [forced.rows(source, strategy) for source in sources(20)]


@pytest.mark.parametrize(
    "place, name",
    [
        (t5.DecoderLayer, "__call__"),
        (t5.EncoderLayer, "__call__"),
        (t5.Decoder, "bias"),
        (t5.T5, "logits"),
        (layers.Attention, "attend"),
        (layers.FeedForward, "__call__"),
        (layers.RelativeBias, "__call__"),
        (layers.RMSNorm, "__call__"),
        (layers, "attend"),
        (layers, "logits_of"),
        (t5, "look_up"),
        (t5, "apply_layers"),
        (t5, "MASKED"),
        (t5.T5, "dropout"),
        (attention, "_forward"),
        (embedding, "_scatter"),
        (relative_bias, "by_bucket"),
        (stack, "_first"),
        (nn, "relu"),
        (nn.Embed, "setup"),
    ],
)
def test_changed_stock_t5_is_detected(place, name, monkeypatch):
    """Its functions are compared by identity; a subclass is another module as well."""
    assert isinstance(backends.fastest(FEW_WORDS, jnp.float32), Xla)
    monkeypatch.setattr(place, name, lambda *given, **more: None)
    assert type(backends.fastest(FEW_WORDS, jnp.float32)) is Backend
    with pytest.raises(ValueError, match="expected the stock T5"):
        backends.XLA.prepare(t5.T5(FEW_WORDS), {})
    monkeypatch.undo()
    assert isinstance(backends.fastest(FEW_WORDS, jnp.float32), Xla)


@pytest.mark.parametrize(
    "model, weights, method",
    [
        (FEW_WORDS, "auto", "sequential"),
        pytest.param(FEW_WORDS, "auto", "pipelined", marks=pytest.mark.slow),
        *(pytest.param(T5Config(**vars(TINY)), "int8", name, marks=pytest.mark.slow) for name in BOTH),
        *(pytest.param(FEW_WORDS, "int8", name, marks=pytest.mark.long) for name in BOTH),
        *(pytest.param(T5Config(**vars(TINY)), "auto", name, marks=pytest.mark.long) for name in BOTH),
    ],
)
def test_layer_by_layer_is_the_stock_decoder(weights, model, method):
    """A step of the module's layers equals XLA's packed step, for all dtypes of stored weights."""
    params = oracle.random_params(model, np.random.default_rng(3))
    config = Config(model=model, grid=GRID, decode=DecodeConfig(max_length=20, weights=weights, scores=True))
    own, packed = (Generator(config, params, None, backend=kind(weights)) for kind in (Backend, Xla))
    for a, b in zip(*(x.decode(sources(12), method=method) for x in (own, packed)), strict=True):
        assert a["row_ids"] == b["row_ids"] and a["log_prob"] == pytest.approx(b["log_prob"], abs=1e-2)


# Backbones of custom classes.


@pytest.mark.slow
def test_opening_a_run_imports_no_backbone(page, tmp_path, monkeypatch, capsys):
    """Python imports the backbone, and the command line names it; its sizes may be those of a T5."""
    config = config_lib.override(RUN, ["model=linear:LinearConfig", "model.d_kv=8"])
    assert config.model == page(**{**vars(RUN.model), "d_kv": 8})
    run = tmp_path / "run"
    checkpoint.save_params(run, config, jax.device_get(config.model.init_params(jax.random.key(0))))
    monkeypatch.delitem(sys.modules, "linear")
    for command in (["to-hf", str(run), str(tmp_path / "out")], ["quantize", str(run), str(tmp_path / "out")]):
        with pytest.raises(UserError, match="model: found linear:LinearConfig"):
            convert(command)
    assert convert(["quantize", str(run), str(tmp_path / "int8"), "--backbone", "linear:LinearConfig"]) == 0
    monkeypatch.delitem(sys.modules, "linear")
    found = pipejax.load(run, overrides=["model=linear:LinearConfig"])
    assert type(found.config.model).__name__ == "LinearConfig" and found.decode([[5, 6, 1]])
    with pytest.raises(UserError, match="UMT5Config; expected linear:LinearConfig, the class"):
        pipejax.load(run, overrides=["model=pipejax.backbones.umt5:UMT5Config"])


class FlaxFeedForward(layers.FeedForward):
    """A feed-forward layer of Flax's layers, which read neither scales nor factors."""

    @nn.compact
    def __call__(self, x, deterministic):
        normed = layers.RMSNorm(self.config.layer_norm_epsilon, self.dtype, name="norm")(x)
        hidden = nn.relu(nn.Dense(self.config.d_ff, use_bias=False, name="wi")(normed))
        return x + nn.Dense(self.config.d_model, use_bias=False, name="wo")(hidden)


def test_unread_scales_and_factors_are_refused(monkeypatch):
    """Flax would ignore them: int8 weights would decode as noise, and factors would be trained without effect."""
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(3))
    for layer in (t5.EncoderLayer, t5.DecoderLayer):
        monkeypatch.setattr(layer, "feed_forward_class", FlaxFeedForward)
    config = Config(model=FEW_WORDS, grid=GRID, decode=DecodeConfig(weights="int8"))
    with pytest.raises(UserError, match=r"wi.scale: T5 does not read it; expected the layers of"):
        Generator(config, params, None, backend=None).decode(sources(1))
    with pytest.raises(UserError, match=r"wi.lora_a: T5 does not read it; expected the layers of"):
        Trainer(dataclasses.replace(change(RUN, train={"lora_rank": 2}), model=FEW_WORDS))


class Gated(t5.DecoderLayer):
    """A T5 with one more parameter, a scalar."""

    def setup(self):
        super().setup()
        self.gate = self.param("gate", nn.initializers.ones, ())

    def __call__(self, x, *given):
        found, cache = super().__call__(x, *given)
        return x + self.gate * (found - x), cache


class GatedDecoder(t5.Decoder):
    layer = Gated


class GatedT5(t5.T5):
    decoder_stack = GatedDecoder


@dataclasses.dataclass(frozen=True)
class GatedConfig(T5Config):
    """A config with or without names for its new parameters."""

    named: bool = True
    sharding = (*T5Config.sharding, (r".*/gate", ()))

    def module(self, **options):
        return GatedT5(self, **options)

    def tensors(self):
        own = {f"decoder/layers_{i}/gate": (f"gate.{i}", "") for i in range(self.num_decoder_layers)}
        return super().tensors() | (own if self.named else {})


def test_additional_parameters_are_checked_before_the_first_step(tmp_path, monkeypatch):
    """A scalar parameter has no axes."""
    model = GatedConfig(**vars(RUN.model))
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    checkpoint.save_params(tmp_path / "run", dataclasses.replace(RUN, model=model), params)
    assert checkpoint.open_run(tmp_path / "run").items["params"]["decoder"]["layers_0"]["gate"].shape == ()
    with pytest.raises(UserError, match=r"model: decoder/layers_0/gate: .* `tensors`"):
        Trainer(dataclasses.replace(RUN, model=dataclasses.replace(model, named=False)))
    monkeypatch.setattr(GatedConfig, "sharding", T5Config.sharding)
    with pytest.raises(
        UserError, match=r"decoder/layers_0/gate: found no rule; expected a rule in GatedConfig\.sharding"
    ):
        Trainer(dataclasses.replace(RUN, model=model))


def test_classes_of_the_main_script_are_refused(monkeypatch):
    """No other program could open such a run."""
    monkeypatch.setattr(UMT5Config, "__module__", "<run_path>")
    with pytest.raises(UserError, match="model: found UMT5Config, a class of the script"):
        config_lib.to_json(Config(model=TINY))


def test_refusal_names_the_class_of_the_checkpoint(tmp_path):
    t5, umt5 = Config(model=T5Config(**vars(TINY))), Config(model=TINY)
    name = "'pipejax.backbones.umt5:UMT5Config'"
    with refuses("model.class", found=name, expected="T5Config as in the checkpoint"):
        resolve_model(umt5, t5)
    with refuses("model.class", found="T5Config", expected=f"{name} as in the checkpoint"):
        resolve_model(t5, umt5)


def test_configs_with_a_former_module_name_are_read():
    described = config_lib.to_json(Config(model=TINY)).replace("pipejax.backbones.umt5", "pipejax.model.umt5")
    assert '"pipejax.model.umt5:UMT5Config"' in described
    assert config_lib.from_json(described, where="here").model == TINY
    assert config_lib.find_class("pipejax.model.umt5:UMT5Config", "model") is UMT5Config


def test_former_module_names_give_the_present_modules_with_a_warning():
    for name in ("model.interface", "methods.interface", "decoding.pipelined", "inference.kernels", "model.t5gemma2"):
        former = f"pipejax.{name}"
        sys.modules.pop(former, None)  # another test may have imported it
        with pytest.warns(DeprecationWarning, match=rf"^{former} ") as caught:
            module = importlib.import_module(former)
        del sys.modules[former]
        assert len(caught) == 1 and module is sys.modules[moved.MOVED[former]]
        assert module.__spec__.name == module.__name__ == moved.MOVED[former]


def test_unknown_backbone_class_raises_one_line():
    line = (
        "model: found nowhere:Nothing, with which this model was trained; expected its module to be imported, by --set "
    )
    with pytest.raises(UserError, match=line):
        config_lib.from_json('{"model": {"class": "nowhere:Nothing"}}', where="here")
    with pytest.raises(UserError, match="which is not a subclass of Backbone; expected MODULE:CLASS"):
        config_lib.from_json('{"model": {"class": "json:JSONDecoder"}}', where="here")


# Hugging Face's names.


class Named(T5Config):
    """A T5 whose model_type belongs to its own class."""

    model_types = ("named-t5", "t5")


class Inherits(T5Config):
    """A config without names."""


class Adds(T5Config):
    """A config with an additional fact, and without names."""

    def facts(self) -> dict[str, object]:
        return super().facts() | {"slope": 2}


class Contradicts(Named):
    """A config with contradictory names."""

    def facts(self) -> dict[str, object]:
        return super().facts() | {"model_type": "other"}


class Grandchild(Named):
    """A config whose parent has the names."""


class Prefixed(Named):
    """A config whose names begin like BART's."""

    def tensors(self) -> dict[str, tuple[str, str]]:
        return {path: (f"model.{name}", axes) for path, (name, axes) in super().tensors().items()}


class Twice(Named):
    """A config in which two parameters have one name, like shared norms."""

    def tensors(self) -> dict[str, tuple[str, str]]:
        table = super().tensors()
        return table | {"decoder/norm/scale": table["encoder/norm/scale"]}


@pytest.mark.parametrize("kind", [Inherits, Adds, Contradicts])
def test_backbone_without_its_own_model_type_is_not_exported_as_t5(kind, tmp_path):
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(1))
    with pytest.raises(UserError, match=rf"^model: {kind.__name__}\.model_types: found [^\n]*; expected a new name"):
        write_hf(kind(**vars(FEW_WORDS)), params, tmp_path / "there", None)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("kind", [Named, Grandchild, Prefixed])
@pytest.mark.parametrize("model", [FEW_WORDS, T5Config(**vars(TINY))], ids=["v1.0", "v1.1"])
def test_backbone_with_model_type_round_trips(kind, model, tmp_path):
    """Neither transformers nor pipejax reads it as a T5; head and scale are restored."""
    params = oracle.random_params(model, np.random.default_rng(1))
    write_hf(kind(**vars(model)), params, tmp_path / "there", None)
    with pytest.raises(ValueError, match="named-t5"):
        transformers.AutoConfig.from_pretrained(tmp_path / "there")
    with pytest.raises(UserError, match="model_type: found 'named-t5'; expected t5 or mt5"):
        read_hf(tmp_path / "there")
    found, back = read_hf(tmp_path / "there", kind)
    assert found == kind(**vars(model))
    before, after = (flatten_dict(x, sep="/") for x in (params, back))
    assert before.keys() == after.keys() and all(np.array_equal(before[path], x) for path, x in after.items())


def rewritten(directory: Path, change: Any) -> None:
    """Changes the names of tensors; tensors without a new name are left out."""
    file = directory / "model.safetensors"
    tensors = {new: x for name, x in load_file(file).items() if (new := change(name))}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net."])
def test_names_that_begin_with_model_may_have_a_wrapper_as_well(prefix, tmp_path, capsys):
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(1))
    write_hf(Prefixed(**vars(FEW_WORDS)), params, tmp_path / "there", None)
    rewritten(tmp_path / "there", lambda name: prefix + name)
    back = read_hf(tmp_path / "there", Prefixed)[1]
    assert np.array_equal(back["decoder"]["norm"]["scale"], params["decoder"]["norm"]["scale"])
    assert f"{prefix}model.decoder.block.0" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Named, Prefixed])
def test_file_without_decoder_is_refused(kind, tmp_path):
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(1))
    write_hf(kind(**vars(FEW_WORDS)), params, tmp_path / "there", None)
    rewritten(tmp_path / "there", lambda name: "" if "decoder" in name else name)
    with pytest.raises(UserError, match=r"found \d+ tensors, none of a decoder"):
        read_hf(tmp_path / "there", kind)


def test_two_parameters_of_one_name_are_refused(tmp_path):
    """They are refused in both directions, since one of them would be lost."""
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(1))
    line = r"^model: Twice\.tensors: found encoder\.final_layer_norm\.weight for encoder/norm/scale and decoder/norm/"
    with pytest.raises(UserError, match=line):
        write_hf(Twice(**vars(FEW_WORDS)), params, tmp_path / "there", None)
    assert not (tmp_path / "there").exists()
    write_hf(FEW_WORDS, params, tmp_path / "t5", None)
    with pytest.raises(UserError, match=line):
        read_hf(tmp_path / "t5", Twice)


class Divided(layers.Attention):
    """An attention that divides by the root of a head's width."""

    def attend(self, x, normed, keys, values, bias, deterministic):
        keys = keys * jnp.asarray(self.config.d_kv, keys.dtype) ** -0.5
        return super().attend(x, normed, keys, values, bias, deterministic)


class DividedEncoderLayer(t5.EncoderLayer):
    attention_class = Divided


class DividedDecoderLayer(t5.DecoderLayer):
    attention_class = Divided


class DividedEncoder(t5.Encoder):
    layer = DividedEncoderLayer


class DividedDecoder(t5.Decoder):
    layer = DividedDecoderLayer


class DividedT5(t5.T5):
    encoder_stack, decoder_stack = DividedEncoder, DividedDecoder


class DividedConfig(T5Config):
    def module(self, **options):
        return DividedT5(self, **options)


@pytest.mark.parametrize("decoded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_attention_of_another_class_is_in_all_layers(decoded):
    """With queries scaled by the same root it equals the stock T5, in a teacher-forced pass and step by step."""
    params = flatten_dict(oracle.random_params(FEW_WORDS, np.random.default_rng(4)), sep="/")
    longer = {path: x * (FEW_WORDS.d_kv**0.5 if path.endswith("query/kernel") else 1) for path, x in params.items()}
    plain, scaled = (unflatten_dict(x, sep="/") for x in (params, longer))
    own = DividedConfig(**vars(FEW_WORDS))
    if decoded:
        config = Config(model=own, grid=GRID)
        mine = Generator(config, scaled, None, backend=None).decode(sources(6))
        stock = Generator(dataclasses.replace(config, model=FEW_WORDS), plain, None).decode(sources(6))
        assert [x["row_ids"] for x in mine] == [x["row_ids"] for x in stock]
        return
    given = [np.arange(1, 9)[None], np.ones((1, 8), bool), np.arange(1, 7)[None], np.tril(np.ones((1, 6, 6), bool))]
    logits = [
        jax.jit(model.module().apply)({"params": x}, *given, np.arange(6)[None])
        for model, x in ((FEW_WORDS, plain), (own, scaled), (own, plain))
    ]
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    assert not np.allclose(logits[0], logits[2], atol=1e-2)


# The page.


@pytest.fixture
def page(tmp_path, monkeypatch) -> Any:
    """The class of the page's example, in a file as on the page."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "backbones.md").read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) <= 80
    (tmp_path / "linear.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "linear", raising=False)
    importlib.invalidate_caches()
    return importlib.import_module("linear").LinearConfig


@pytest.mark.slow
def test_backbone_of_the_page_attends_less_to_distant_tokens(page):
    """It equals a T5 whose bias table has its slopes, with a bucket for each distance, and decodes as it is forced."""
    own = page(**vars(FEW_WORDS))
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(5))
    table = -np.asarray([2.0**-4, 2.0**-8]) * np.arange(33)[:, None]
    of_t5 = dataclasses.replace(FEW_WORDS, relative_attention_num_buckets=64, relative_attention_max_distance=65)
    with_table = {**params, "decoder": {**params["decoder"], "relative_bias": {"embedding": np.resize(table, (64, 2))}}}
    with_table["encoder"] = {**params["encoder"], "relative_bias": {"embedding": np.zeros((64, 2))}}
    del params["decoder"]["relative_bias"]
    params["encoder"]["relative_bias"]["embedding"] *= 0
    config = Config(model=own, grid=GRID, decode=DecodeConfig(max_length=20, draft_tokens=3))
    generator, plain = Generator(config, params, None), dataclasses.replace(config, model=of_t5)
    both = (x.decode(sources(12), batch_size=4) for x in (generator, Generator(plain, with_table, None)))
    for a, b in zip(*both, strict=True):
        assert a["row_ids"] == b["row_ids"]
    forced = TeacherForced(own.module(), params, GRID.delay)
    check_answers(generator, forced, sources(20), "pipelined", briefly=True)


@pytest.mark.long
def test_the_backbone_of_the_page_is_trained(page, tmp_path):
    config = dataclasses.replace(change(RUN, mesh={"data": 2, "tensor": 2}), model=page(**vars(RUN.model)))
    run = pipejax.fit(config, tmp_path / "run")
    assert type(pipejax.load(run).config.model) is page
    assert pipejax.load(run).decode(["red apples"], method="sequential")


@pytest.mark.parametrize(
    "spelling", [["--set", "model=pipejax.backbones.umt5:{}"], ["--backbone", "pipejax.backbones.umt5:{}"]]
)
def test_commands_import_a_backbone_by_setting(spelling, tmp_path, capsys):
    """The setting has two spellings, and the help shows the first."""
    theirs = tmp_path / "theirs"
    write_hf(TINY, varied(TINY, 0), theirs, None)
    flag, right, wrong = spelling[0], spelling[1].format("UMT5Config"), spelling[1].format("Nothing")
    run = str(tmp_path / "run")
    assert convert(["from-hf", str(theirs), run, flag, right]) == 0
    assert type(checkpoint.open_run(run).config.model) is UMT5Config
    commands = {
        "convert": (convert, ["to-hf", run, str(tmp_path / "out")]),
        "push": (push, [run, "owner/name"]),
        "verify": (verify, ["verify", run]),
        "picture": (picture, ["records.jsonl", "--output", "x.html", "--checkpoint", run]),
    }
    for name, (command, argv) in commands.items():
        with pytest.raises(UserError, match=r"model: found 'pipejax\.backbones\.umt5:Nothing', which cannot be "):
            command([*argv, flag, wrong])
        with pytest.raises(UserError, match=r"^--set grid\.delay: cannot be changed here; expected model=MODULE:CLASS"):
            command([*argv, "--set", "grid.delay=2"])
        if name != "picture":
            assert command([*argv, flag, right]) == 0
