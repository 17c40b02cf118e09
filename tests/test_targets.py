"""Programs with kernels for absent GPUs: lowered on any machine, and compiled if compilers are installed.

`make venv-programs` installs these. `make test-newest` runs this file with the newest JAX, and skips nothing.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pipejax.apps.plan import step_memory, targets
from pipejax.config import Config, DataConfig, MeshConfig, T5Config, TrainConfig
from pipejax.decoding import Drafts, Pipelined, with_drafts
from pipejax.decoding.drafters import FromSource
from pipejax.inference import configurations
from pipejax.inference.configurations import DEFAULT, Configuration
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.kernels import block_attention, gpu
from pipejax.kernels.backends import Gpu
from pipejax.model.sharding import named_device
from pipejax.training import memory
from pipejax.training.step import Trainer

KINDS = {"h100": "NVIDIA H100 80GB HBM3", "rtx4090": "NVIDIA GeForce RTX 4090"}
TINY = T5Config(128, d_model=64, d_kv=16, d_ff=128, num_heads=2, num_layers=1, num_decoder_layers=1)
KERNEL = "__gpu$xla.gpu.triton"

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
compiled = pytest.mark.skipif(
    "PIPEJAX_TEST_NEWEST" not in os.environ and not (Path(sys.prefix) / "programs").is_dir(),
    reason="no compilers for GPUs here: make venv-programs",
)


@pytest.mark.parametrize("kind", [*KINDS.values(), "NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize("trial", [lambda: block_attention.difference(64), lambda: gpu.trial(2)])
def test_kernels_are_lowered_for_absent_gpu(kind: str, trial: Any) -> None:
    device: Any = SimpleNamespace(device_kind=kind, platform="gpu")
    with named_device(device):
        text = jax.jit(trial).trace().lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(KERNEL) >= 2


def test_present_device_needs_no_target_name() -> None:
    before = jax.sharding.get_abstract_mesh()
    with named_device(jax.devices()[1]):
        assert jax.sharding.get_abstract_mesh() == before


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("name, remat", [("h100", "none"), ("rtx4090", "layers")])
def test_training_step_is_compiled_for_absent_gpus(name: str, remat: str) -> None:
    config = Config(
        model=TINY,
        data=DataConfig(max_source=256, max_target=64),
        train=TrainConfig(batch_size=4, dtype="bfloat16", remat=remat),
        mesh=MeshConfig(data=1),
    )
    trainer = Trainer(config, targets.find_target(name, "--target").devices(1))
    step = trainer.program(memory.longest_batch(config))
    assert trainer.blocks and KERNEL in (step.as_text() or "")
    assert step_memory.compiled_bytes(trainer, config) > 0


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_kernel_is_compiled_for_absent_gpus(name: str) -> None:
    device = targets.find_target(name, "--target").devices(1)[0]
    place = jax.sharding.SingleDeviceSharding(device)
    with named_device(device):
        lowered = jax.jit(lambda: gpu.trial(2), out_shardings=place).lower()
    assert KERNEL in (lowered.compile().as_text() or "")


def absent(device: jax.Device, configuration: Configuration) -> Programs:
    """The programs of a T5 for an absent device, with shapes instead of weights."""
    made = Programs(TINY, jnp.dtype(jnp.bfloat16), devices=[device], backend=Gpu())
    made.configurations.fixed, made._call_costs = configuration, 1.0
    params = jax.eval_shape(TINY.init_params, jax.random.key(0))
    place = NamedSharding(made._mesh(1), PartitionSpec())
    made._placed[1] = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(lambda params: made.backend.prepare(made.model, params), params),
    )
    return made


GRID = Pipelined(1, 20, 5)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "strategy, configuration",
    [
        (GRID, Configuration(graph=True)),
        (GRID, DEFAULT),
        (with_drafts(GRID, Drafts(FromSource(), 3)), Configuration(graph=True, steps=1)),
    ],
    ids=["graph", "host", "drafts"],
)
def test_decode_loop_is_one_graph_if_chosen_and_results_reuse_memory(
    name: str, strategy: Any, configuration: Configuration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the option the host controls the loop. Results replace the argument in both cases."""
    device = targets.find_target(name, "--target").devices(1)[0]
    monkeypatch.setattr(configurations, "GRAPH", configurations.GRAPH | {"xla_dump_to": str(tmp_path)})
    if configuration == DEFAULT:
        options = property(lambda configuration: {"xla_dump_to": str(tmp_path)})
        monkeypatch.setattr(Configuration, "compiler_options", options)
    made = absent(device, configuration)
    with named_device(device):
        made.warm_up(strategy, batch_size=1, length=16, report=Report())
    table: dict[Any, Any] = made._compiled
    [decoder] = [program for (part, *_), program in table.items() if part != "encoder"]
    memory = decoder.memory_analysis()
    table_of_pointers = 8 * len(jax.tree.leaves(decoder.out_info))
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= table_of_pointers
    thunks = max(tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")).read_text()
    started = [line for line in thunks.splitlines() if line[:1].isdigit()]
    assert thunks.count("kWhile") >= 1 + (configuration.steps != 1)
    assert (len(started) == 1 and "kCommandBuffer" in started[0]) == configuration.graph
    assert any("kWhile" in line for line in started) != configuration.graph
