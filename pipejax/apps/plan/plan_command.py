"""Estimates the memory that a training step needs on each device, without allocating it.

    pipejax plan --config FILE [--model base] [--set KEY=VALUE ...] [--target NAME | --compile | --measure]

The estimate is computed for the longest batch that the config allows: every source and every target has its maximum
length. --target also compiles the step for that device, which need not be present, and shows the memory that XLA
allocates. --compile does the same for this machine's CPU, simulating as many devices as the mesh needs; a CPU stores
bfloat16 as float32. --measure runs real steps on this machine's accelerators and shows the peak that they report.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from pipejax import config as config_lib
from pipejax.apps.plan import step_memory
from pipejax.config import Config
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.files import look, read_small
from pipejax.system.strict_json import JsonObject
from pipejax.training import memory as memory_lib
from pipejax.training.memory import GIB


def _gib(text: str) -> float:
    """Parses a number of GiB; an argparse type."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number of GiB") from error


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax plan", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="a config file, such as configs/jsonl.py")
    parser.add_argument("--model", metavar="SIZE", help="such as base or t5gemma-b-b (default: the config's model)")
    parser.add_number("--devices", "devices to plan for (default: the devices of the mesh)", most=2**12)
    parser.add_argument(
        "--memory",
        type=_gib,
        metavar="GIB",
        help="exit with code 1 if the estimate, or with --target XLA's figure, is more than this on each device",
    )
    parser.add_argument(
        "--target", metavar="NAME", help="compile the step for rtx4090, h100, v5e, v5e:4x4 ... and show XLA's figure"
    )
    parser.add_argument("--compile", action="store_true", help="compile the step for the CPU and show XLA's figure")
    parser.add_argument("--measure", action="store_true", help="make real steps on this machine's accelerators")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_overrides("override a setting of the config (repeatable)")
    flags = parser.parse_args(argv)
    if flags.memory is not None and not 0 <= flags.memory < math.inf:
        raise UserError("--memory", found=f"{flags.memory:g}", expected="at least 0")
    if flags.target is not None and (flags.compile or flags.measure):
        raise UserError("--target", found="--compile or --measure together with --target", expected="one of them")
    config = _resolve(config_lib.load(flags.config, flags.overrides), flags.model)
    from pipejax.apps.plan import targets

    kind = targets.find_target(flags.target, "--target") if flags.target is not None else None

    import jax  # imported once all names are known to be valid

    mesh = config.mesh
    if flags.measure and jax.default_backend() == "cpu":
        raise UserError("--measure", found="no GPU or TPU here", expected="one", hint="--compile needs none")
    if not flags.measure:  # planning needs no accelerator: simulate the devices on the CPU
        devices = flags.devices or max(mesh.data, 1) * mesh.fsdp * mesh.tensor
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    if config.train.dtype == "auto":  # the value that "auto" has on a GPU or TPU
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, dtype="bfloat16"))
    absent = kind.devices(devices) if kind else None
    if flags.memory:
        memory: float | None = flags.memory * GIB
    elif isinstance(kind, targets.GpuTarget):
        memory = step_memory.SHARE * kind.device_memory_size
    else:
        memory = memory_lib.device_memory()
    config = memory_lib.choose_remat(config, memory, absent)
    trainer, terms = step_memory.plan(config, absent)
    total = sum(terms.values())
    found: JsonObject = {
        "devices": trainer.mesh.size,
        "dtype": config.train.dtype,
        "attention": "in blocks" if trainer.blocks else "with arrays of queries by keys",
        "remat": config.train.remat,
        "estimate_bytes": {name: int(size) for name, size in terms.items()},
        "estimate_total_bytes": int(total),
    }
    if flags.compile or kind:
        found["compiled_for"] = flags.target or "CPU"
        cli.note(f"compiling for the {found['compiled_for']} (a minute or more for the larger models)")
        found["compiled_total_bytes"] = int(step_memory.compiled_bytes(trainer, config))
    if flags.measure:
        peak, seconds = step_memory.measured_bytes(trainer, config)
        longest = memory_lib.longest_batch(config)
        tokens = math.prod(longest["source"]) + math.prod(longest["inputs"])
        found |= {"measured_peak_bytes": peak, "step_seconds": seconds, "tokens_per_second": tokens / seconds}
    if flags.memory is not None:
        found["fits"] = (found["compiled_total_bytes"] if kind else total) <= flags.memory * GIB
    print(json.dumps(found) if flags.json else "\n".join(_lines(found, flags.memory)))
    return 0 if found.get("fits", True) else 1


def _resolve(config: Config, name: str | None) -> Config:
    """Returns the config with a model: `--model`, the config's model, or the architecture of `train.init_from`."""
    from pipejax.model.t5_config import architecture

    if name is not None:
        return dataclasses.replace(config, model=architecture(name))
    if config.model is None and config.train.init_from:
        path = Path(config.train.init_from) / "config.json"
        if look(path, "train.init_from:") == "file":
            found = config_lib.from_json(read_small(path), where=str(path))
            config = dataclasses.replace(config, model=found.model)
        else:
            raise UserError(
                "--model", found=f"none, and no {path} either", expected="a size, such as base, or the checkpoint"
            )
    if config.model is None:
        raise UserError("--model", found="none, and the config has no model either", expected="a size, such as base")
    if config.model.like_t5() is not config.model:
        cli.note(
            f"{type(config.model).__name__}: activations are estimated for a T5 with the larger sizes of both stacks"
        )
    return config


def _lines(found: JsonObject, memory: float | None) -> list[str]:
    """Returns the results as lines for people."""
    unit, size_of = ("GiB", GIB) if found["estimate_total_bytes"] >= GIB else ("MiB", GIB / 1024)

    def line(name: str, size: float) -> str:
        return f"  {name:<40}{size / size_of:8.2f} {unit}"

    where = f"each of {found['devices']} devices" if found["devices"] > 1 else "one device"
    how = f"train.remat = {found['remat']}, attention {found['attention']}"
    lines = [f"on {where}, {found['dtype']}, {how}, by arithmetic:"]
    lines += [line(name, size) for name, size in found["estimate_bytes"].items()]
    lines += [line("in all (estimated)", found["estimate_total_bytes"])]
    if "compiled_total_bytes" in found:
        where, more = found["compiled_for"], ", bfloat16 as float32" if found["compiled_for"] == "CPU" else ""
        lines += [line(f"in all (XLA for the {where}{more})", found["compiled_total_bytes"])]
    if "step_seconds" in found:
        peak = found["measured_peak_bytes"]
        lines += [line("peak (measured)", peak) if peak else "  peak: the device reports none"]
        lines += [f"  {found['step_seconds']:.2f} s a step, {found['tokens_per_second']:.0f} tokens/s"]
    if memory is not None:
        which = "the estimate" if found.get("compiled_for", "CPU") == "CPU" else "XLA's figure"
        lines += [f"{which} {'fits' if found['fits'] else 'does not fit'} in {memory:g} GiB"]
    return lines
