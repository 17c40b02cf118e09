"""Makes one run on six meshes of eight fake devices, compares the losses, and restores each run onto every mesh.

python -m lab.faults.meshes CONFIG SCRATCH OUT
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lab.faults import runs
from lab.faults.runs import Commands
from pipejax import config as config_lib
from pipejax.checkpoint import Store
from pipejax.config import MeshConfig
from pipejax.data import make_task
from pipejax.data.batches import TrainingBatches
from pipejax.data.tokenizer import Tokenizer
from pipejax.model import sharding
from pipejax.training.step import Trainer

MESHES = ((1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 4), (4, 1, 2))  # data, fsdp, tensor
STEPS = 6


def many(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Runs `main` in a separate process, since it needs eight devices."""
    config, out = runs.prepare(scratch / "tiny"), scratch / "meshes.json"
    command = commands.start("lab.faults.meshes", str(config), str(scratch / "saved"), str(out), devices=8)
    if command.end(timeout=1800) != 0:
        return {"ok": False, "failures": command.said()[-5:]}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main(argv: Sequence[str]) -> int:
    """Trains six steps on each mesh, saves, and restores each save onto each mesh."""
    path, scratch, out = (Path(argument) for argument in argv)
    base = config_lib.load(path)
    base = dataclasses.replace(base, train=dataclasses.replace(base.train, length_group=1))
    assert base.model is not None
    batches = TrainingBatches(
        make_task(base.data).examples("train"), Tokenizer.load(base.data.tokenizer), base, base.model
    )
    losses: list[list[float]] = []
    trainers, births, saved = [], [], []
    for number, (data, fsdp, tensor) in enumerate(MESHES):
        config = dataclasses.replace(base, mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor))
        trainer = Trainer(config)
        state = trainer.fresh()
        births.append(_bits(state.params))
        losses.append([])
        for step in range(STEPS):
            arrays = sharding.put_batch(batches[step].arrays, trainer.mesh)
            state, values = trainer.step(state, arrays, trainer.dropout_key(step + 1))
            losses[-1].append(float(values["loss"]))
        items = {"params": state.params, "state": state.optimizer}
        saved.append(_bits(items))
        store = Store(scratch / str(number), writable=True)
        assert store.save(STEPS, items, config=config, wait=True)
        store.close()
        trainers.append(trainer)
    exact = 0
    for number, expected in enumerate(saved):
        for trainer in trainers:
            templates = trainer.templates()
            restored = Store(scratch / str(number)).restore(STEPS, lambda _, t=templates: t)  # type: ignore[misc]
            placed = all(
                x.sharding == t.sharding
                for x, t in zip(jax.tree.leaves(restored.items), jax.tree.leaves(templates), strict=True)
            )
            exact += placed and _bits(restored.items) == expected
    apart = float(np.abs(np.asarray(losses) - np.asarray(losses[0])).max())
    equal = sum(birth == births[0] for birth in births)
    result = {
        "meshes": len(MESHES),
        "initial_parameters_equal": equal,
        "losses_apart_at_most": apart,
        "restores": len(MESHES) ** 2,
        "restores_exact": exact,
        "ok": equal == len(MESHES) and apart < 2e-6 and exact == len(MESHES) ** 2,
    }
    out.write_text(json.dumps(result))
    return 0


def _bits(tree: Any) -> dict[str, bytes]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys): np.asarray(x).tobytes() for keys, x in leaves}
