"""The memory plan: its estimate is compared with the compiler's figure, and its command is tested."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from pipejax.apps.plan import plan_command, step_memory, targets
from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.config import Config, DataConfig, MeshConfig, T5Config, TrainConfig
from pipejax.model.sharding import make_mesh
from pipejax.model.t5_config import ARCHITECTURES
from pipejax.system.errors import UserError
from pipejax.training import memory, start
from pipejax.training.step import Trainer

ROOT = Path(__file__).parents[1]
MODEL = T5Config(vocab_size=2048, d_model=128, d_kv=32, d_ff=512, num_heads=4, num_layers=4, num_decoder_layers=4)


def config(source, mesh, **train):
    return Config(
        model=MODEL,
        data=DataConfig(max_source=source, max_target=64),
        train=TrainConfig(batch_size=8, pack=1, dtype="float32", **train),
        mesh=MeshConfig(**mesh),
    )


def shallow(config):
    """The config with one layer instead of four if size does not matter, which compiles in a third of the time."""
    return dataclasses.replace(config, model=dataclasses.replace(MODEL, num_layers=1, num_decoder_layers=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, mesh, train",
    [
        pytest.param(512, {"data": 1}, {"remat": "layers"}, marks=pytest.mark.long),
        (512, {"data": 1}, {"remat": "layers", "accumulate": 4, "dropout": 0.0}),
        pytest.param(512, {"data": 1}, {"remat": "dots", "dropout": 0.0}, marks=pytest.mark.long),
        pytest.param(512, {"data": 1}, {"remat": "dots", "lora_rank": 4}, marks=pytest.mark.long),
        pytest.param(256, {"data": 1, "fsdp": 2}, {"remat": "layers"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_estimate_is_close_to_the_compilers_allocation(source, mesh, train):
    chosen = config(source, mesh, **train)
    trainer, terms = step_memory.plan(chosen)
    compiled = step_memory.compiled_bytes(trainer, chosen)
    assert 0.75 * compiled < sum(terms.values()) < 1.35 * compiled


def test_dtype_auto_counts_as_the_dtype_of_the_device(monkeypatch):
    """The line of `pipejax train --dry-run`, whose config keeps "auto", counts it in the same way."""
    shapes = {"source": (8, 512), "inputs": (8, 64)}

    def total(dtype):
        chosen = dataclasses.replace(config(512, {"data": 1}).train, remat="layers", dtype=dtype)
        sizes = {"state": 0, "gradients": 0, "layers": 0, "blocks": True, "logits": 2**25}
        return sum(memory.estimate(Config(model=MODEL, train=chosen), shapes, **sizes).values())

    assert total("auto") == total("float32") > total("bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert total("auto") == total("bfloat16")


@pytest.mark.parametrize("remat", ["none", "dots", "layers"])
def test_attention_in_blocks_grows_with_the_length(remat):
    """For twice the length, the memory counted by tokens doubles, and there is no memory by pairs of tokens."""
    chosen = config(512, {"data": 1}, remat=remat)

    def terms(length, blocks):
        shapes = {"source": (8, length), "inputs": (2, length // 2)}
        return memory.estimate(chosen, shapes, state=0, gradients=0, layers=0, blocks=blocks, logits=2**25)

    for name, size in terms(4096, True).items():
        assert terms(8192, True)[name] <= 2 * size, name
        assert not name.startswith(("kept", "one ", "encoded")) or terms(8192, True)[name] == 2 * size, name
    assert ("gradient" in terms(4096, True)) == (remat == "none")  # with other values of remat a layer needs more
    named = "position biases and their gradient"
    assert terms(8192, False)[named] > 3 * terms(4096, False)[named] and named not in terms(4096, True)
    assert sum(terms(4096, False).values()) > 3 * sum(terms(4096, True).values())


@pytest.mark.slow
def test_estimate_of_t5gemma_is_close_to_the_compilers_allocation(capsys):
    side = GemmaStack(128, 512, 4, 2, 32, 32)
    chosen = dataclasses.replace(
        config(512, {"data": 1}, remat="layers", dropout=0.0), model=T5GemmaConfig(side, side, 2048, 4, 4)
    )
    trainer, terms = step_memory.plan(plan_command._resolve(chosen, None))
    compiled = step_memory.compiled_bytes(trainer, chosen)
    assert 0.75 * compiled < sum(terms.values()) < 1.5 * compiled
    assert "T5GemmaConfig: activations are estimated for a T5 with" in capsys.readouterr().err


@pytest.mark.slow
def test_the_state_is_counted_exactly():
    chosen = shallow(config(64, {"data": 1, "fsdp": 2, "tensor": 2}))
    _, terms = step_memory.plan(chosen)
    trainer = Trainer(chosen)
    state = trainer.fresh()
    device = trainer.mesh.devices.flat[0]
    leaves = [leaf for tree in (state.params, state.optimizer) for leaf in _leaves(tree)]
    held = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device)
    assert terms["parameters and moments"] == held


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


@pytest.mark.slow
def test_measurement_makes_a_training_step():
    chosen = shallow(config(32, {"data": 1}))
    peak, seconds = step_memory.measured_bytes(Trainer(chosen), chosen, steps=1)
    assert peak is None and seconds > 0  # a CPU reports no peak


def test_published_sizes_have_the_published_parameter_counts():
    """Raffel et al. 2020 (section 3.1.2) state 220 and 770 million parameters for T5 v1.0; counted are 223 and 738."""
    for name, millions in (("small", 60.5), ("base", 222.9), ("large", 737.7)):
        model = ARCHITECTURES[name]
        layer = 4 * model.d_model * model.num_heads * model.d_kv
        encoder, decoder = (n * layer + 2 * model.d_model * model.d_ff for n in (1, 2))
        matrices = model.num_layers * encoder + model.num_decoder_layers * decoder + model.vocab_size * model.d_model
        assert abs(matrices / 1e6 - millions) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("remat, fits", [("layers", True), ("none", False)])
def test_command_prints_the_plan(remat, fits, tmp_path):
    command = [sys.executable, "-m", "pipejax", "plan", "--config", "configs/jsonl.py", "--model", "large", "--json"]
    settings = {"train.remat": remat, "train.accumulate": 4, "mesh.fsdp": 2, "mesh.data": 1}
    command += [f"--set={key}={value}" for key, value in settings.items()]
    done = subprocess.run([*command, "--memory", "24"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (0 if fits else 1), done.stderr
    found = json.loads(done.stdout)
    assert found["devices"] == 2 and found["dtype"] == "bfloat16" and found["fits"] is fits
    assert found["estimate_total_bytes"] == pytest.approx(sum(found["estimate_bytes"].values()), abs=20)


def test_a_config_without_an_architecture_is_refused():
    command = [sys.executable, "-m", "pipejax", "plan", "--config", "configs/jsonl.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --model: found none")
    assert not done.stdout


@pytest.mark.parametrize("name, wanted", [("h100", "jax-cuda12-plugin=="), ("v5e:2x4", "libtpu")])
def test_a_compiler_that_is_missing_is_named(name, wanted, monkeypatch):
    def absent(module):
        raise ImportError(module)

    monkeypatch.setattr(targets.importlib, "import_module", absent)
    monkeypatch.setattr(targets, "_added", set())
    with pytest.raises(UserError, match=f"pip install --no-deps --target .*{wanted}"):
        targets.find_target(name, "--target").devices(1)


def test_a_target_is_known_or_a_topology():
    assert targets.find_target("v5e:4x4", "--target") == targets.TpuTarget("v5e:4x4")
    with pytest.raises(UserError, match="--target: found 'rtx9090'; expected h100"):
        targets.find_target("rtx9090", "--target")


# Rematerialisation, chosen by the memory.


def known_needs(monkeypatch):
    """Replaces the estimate by given GiB of a step."""
    needs = {"none": 30, "dots": 12, "layers": 9}
    monkeypatch.setattr("pipejax.training.step.Trainer", lambda config, devices=None: None)
    monkeypatch.setattr(
        memory, "estimator", lambda trainer: lambda config: {"all": needs[config.train.remat] * memory.GIB}
    )


def with_remat(chosen, remat):
    return dataclasses.replace(chosen, train=dataclasses.replace(chosen.train, remat=remat))


@pytest.mark.parametrize(
    "gib, remat, why",
    [
        (
            40,
            "none",
            "for 40.0 GiB, the fastest value that leaves a quarter of it free; estimated memory of a step: 30.0 GiB",
        ),
        (39.9, "dots", "30.0 GiB with none, 12.0 GiB with dots"),
        (16, "dots", "for 16.0 GiB, the fastest"),
        (15.9, "layers", "12.0 GiB with dots, 9.0 GiB with layers"),
        (1, "layers", "for 1.0 GiB, the value that needs the least memory"),
    ],
)
def test_memory_decides_rematerialisation(gib, remat, why, monkeypatch, caplog):
    known_needs(monkeypatch)
    caplog.set_level("INFO")
    given = config(64, {"data": 1})
    assert given.train.remat == "auto"
    assert memory.choose_remat(given, gib * memory.GIB) == with_remat(given, remat)
    (line,) = caplog.messages
    assert line.startswith(f"train.remat: {remat} ") and why in line


def test_unknown_memory_or_arithmetic_disables_rematerialisation(monkeypatch, caplog):
    caplog.set_level("INFO")
    given = config(64, {"data": 1})
    assert memory.choose_remat(given, None) == with_remat(given, "none")
    foreign = dataclasses.replace(given, model=None)
    assert memory.choose_remat(foreign, 2**40) == with_remat(foreign, "none")
    asked = with_remat(given, "dots")
    assert memory.choose_remat(asked, 1) is asked and not caplog.messages


@pytest.mark.parametrize(
    "limits, least", [((5, 3), 3), ((5, None), None), ((), None)], ids=["known", "one is silent", "a CPU"]
)
def test_memory_of_devices_is_their_minimum(limits, least, monkeypatch):
    import jax

    stats = [{} if limit is None else {"bytes_limit": limit} for limit in limits] or [None]
    devices = [SimpleNamespace(memory_stats=lambda own=own: own) for own in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory.device_memory() == least


class Begun(BaseException):
    """Raised if a trainer would be made."""


def begun_with(monkeypatch, given, saved=None):
    def begin(chosen):
        raise Begun(chosen)

    def newest(expect, set_aside):
        return saved and expect(saved)

    monkeypatch.setattr(start, "Trainer", begin)
    monkeypatch.setattr(start, "_find_tokenizer", lambda *given: SimpleNamespace(size=2))
    monkeypatch.setattr(start.methods, "trained", lambda config: SimpleNamespace(check_text=lambda tokenizer: None))
    store = SimpleNamespace(steps=lambda: [1] if saved else [], newest=newest)
    with pytest.raises(Begun) as found:
        start.start_run(given, SimpleNamespace(path=Path("run")), store, {})
    return found.value.args[0].train.remat


def test_run_keeps_its_choice_of_rematerialisation(monkeypatch):
    known_needs(monkeypatch)
    given = config(64, {"data": 1})
    assert begun_with(monkeypatch, given) == "none"  # a CPU
    monkeypatch.setattr(start, "device_memory", lambda: 20 * memory.GIB)
    assert begun_with(monkeypatch, given) == "dots"
    for before in ("none", "dots", "layers"):
        assert begun_with(monkeypatch, given, with_remat(given, before)) == before
    own = dataclasses.replace(given, method={"class": "elsewhere:Own", "rows": [1]})  # as in the file of a run
    assert begun_with(monkeypatch, own, with_remat(own, "dots")) == "dots"
    with pytest.raises(UserError, match=r"train\.remat: 'layers' -> 'none'; expected no change on resume"):
        begun_with(monkeypatch, with_remat(given, "none"), with_remat(given, "layers"))


def test_trainer_without_a_chosen_remat_recomputes_nothing():
    assert Trainer(shallow(config(64, {"data": 1}))).model.remat == "none"
    assert Trainer(shallow(config(64, {"data": 1}, remat="dots"))).model.remat == "dots"


def test_described_chips_of_two_hosts_are_a_mesh(monkeypatch):
    """They belong to other processes; a part without all hosts is still refused."""
    chips: Any = [SimpleNamespace(process_index=i // 4) for i in range(8)]
    monkeypatch.setattr(jax, "make_mesh", lambda *sizes, devices, **more: devices)
    assert make_mesh(1, 8, 1, chips) == chips
    with pytest.raises(UserError, match="mesh: found data x fsdp x tensor = 4; expected devices of all"):
        make_mesh(1, 4, 1, chips)
