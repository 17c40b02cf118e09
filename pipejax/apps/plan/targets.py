"""Accelerators for which programs are compiled without the device: descriptions for XLA's compilers.

A GPU is described by its figures, as in openxla/xla under xla/backends/gpu/target_config/specs; a TPU by the name of
its topology. The compiled programs cannot run on this machine.
"""

import dataclasses
import importlib
import importlib.metadata
import os
import re
import sys
from pathlib import Path

import jax
from jax.experimental import topologies

from pipejax.system.errors import UserError, did_you_mean

SAME = {  # values that all of these GPUs share
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    # XLA puts loops into CUDA graphs from CUDA 12.3 on, and leaves them out if it does not know the versions.
    "driver_version": '"12.9.0"',
    "runtime_version": '"12.9.0"',
    "compile_time_toolkit_version": '"12.9.0"',
}


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """The properties of an NVIDIA GPU that the compiler needs; memory in bytes, bandwidth in bytes per second."""

    name: str
    capability: tuple[int, int]
    core_count: int
    threads_per_core_limit: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    device_memory_size: int
    memory_bandwidth: int
    l2_cache_size: int
    clock_rate_ghz: float

    def devices(self, count: int) -> list[jax.Device]:
        """Returns `count` such devices in one machine."""
        _add_compiler("jax_plugins.xla_cuda12")
        return list(
            topologies.get_topology_desc(
                "gpu", platform="cuda", topology=f"1x1x{count}", target_config=self.description()
            ).devices
        )

    def description(self) -> str:
        """Returns a GpuTargetConfigProto in text form."""
        own = {key: value for key, value in vars(self).items() if key not in ("name", "capability")}
        major, minor = self.capability
        info = " ".join(f"{key}: {value}" for key, value in (SAME | own).items())
        return (
            f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
            f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }} '
            f'device_description_str: "{self.name}"'
        )


@dataclasses.dataclass(frozen=True)
class TpuTarget:
    """A Cloud TPU topology, such as "v5e:2x2"."""

    topology: str

    def devices(self, count: int) -> list[jax.Device]:
        """Returns the first `count` chips of the topology."""
        _add_compiler("libtpu")
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # else it would ask a metadata server for the machine's type
        found = topologies.get_topology_desc(platform="tpu", topology_name=self.topology).devices
        if len(found) < count:
            raise UserError(self.topology, found=f"{count} devices requested", expected=f"at most {len(found)}")
        return list(found)[:count]


TARGETS: dict[str, GpuTarget | TpuTarget] = {
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 2048, 233472, 232448, 84942979072, 3352320000000, 52428800, 1.98
    ),
    "rtx4090": GpuTarget(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 1536, 102400, 101376, 25393692672, 1008096000000, 75497472, 2.52
    ),
    "v5e": TpuTarget("v5e:2x2"),
    "v5p": TpuTarget("v5p:2x2x1"),
    "v6e": TpuTarget("v6e:2x2"),
}


def find_target(name: str, flag: str) -> GpuTarget | TpuTarget:
    """Returns one of TARGETS, or a TPU topology such as "v5e:4x4"; `flag` is the origin of the name, for messages.

    Raises:
      UserError: the name is unknown.
    """
    if name in TARGETS:
        return TARGETS[name]
    if re.fullmatch(r"v\d[a-z]?:\d+(x\d+)+", name):
        return TpuTarget(name)
    hint = did_you_mean(name, TARGETS)
    raise UserError(
        flag, found=f"{name!r}", expected=f"{', '.join(TARGETS)}, or a TPU's topology such as v5e:2x4", hint=hint
    )


_added: set[str] = set()


def _add_compiler(module: str) -> None:
    """Registers a compiler with JAX, which does not look for plugins where the compiler is installed."""
    if module in _added:
        return
    place = str(Path(sys.prefix) / "programs")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # CUDA itself is not installed
    sys.path.append(place)
    try:
        compiler = importlib.import_module(module)
    except ImportError as error:
        if module == "libtpu":
            asked = importlib.metadata.requires("jax") or []
            wanted = next((f'"{text.partition(";")[0].strip()}"' for text in asked if text.startswith(module)), module)
        else:
            plugin, version = "jax-cuda12-plugin", jax.__version__
            wanted = f"{plugin}=={version} jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12"
        command = f"{sys.executable} -m pip install --no-deps --target {place} {wanted}"
        raise UserError(
            found="no compiler for this device", expected=f"a compiler, after running: {command}"
        ) from error
    finally:
        sys.path.remove(place)
    if module != "libtpu":
        compiler.initialize()
    _added.add(module)
