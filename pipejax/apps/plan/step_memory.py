"""The memory that a training step needs on each device: an estimate, the compiler's figure, or a measurement."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipejax.config import Config
from pipejax.system import Tree
from pipejax.training.memory import estimator, longest_batch

if TYPE_CHECKING:
    import jax

    from pipejax.training.step import Trainer

SHARE = 0.75  # the share of a GPU's memory that JAX reserves, unless XLA_PYTHON_CLIENT_MEM_FRACTION sets another one


def plan(config: Config, devices: "Sequence[jax.Device] | None" = None) -> "tuple[Trainer, dict[str, float]]":
    """Returns a trainer, which has compiled nothing yet, and the estimate in bytes by term.

    Args:
      config: the experiment.
      devices: the devices to plan for; None: this machine's devices.
    """
    from pipejax.training.step import Trainer

    trainer = Trainer(config, devices)
    return trainer, estimator(trainer)(trainer.config)


def compiled_bytes(trainer: "Trainer", config: Config) -> float:
    """Returns the total bytes that XLA allocates on each device for the compiled step."""
    analysis = trainer.program(longest_batch(config)).memory_analysis()
    assert analysis is not None, "all of our compilers have one"
    return (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def stepper(trainer: "Trainer", config: Config) -> Callable[[], float]:
    """Returns a function that makes one real step on random tokens per call and returns its seconds.

    The first call also puts parameters and moments on the devices, which its seconds do not include.
    """
    import jax

    from pipejax.model.sharding import put_batch

    assert config.model is not None
    rng, shapes = np.random.default_rng(0), longest_batch(config)
    arrays = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    for name in ("source", "inputs", "targets"):
        arrays[name] = rng.integers(2, config.model.vocab_size, shapes[name], dtype=np.int32)
    arrays["source_length"][:] = shapes["source"][1]
    arrays["number"][:] = np.arange(shapes["source"][0])
    arrays["slots"][:] = shapes["inputs"][1]
    arrays["time"][:] = np.arange(shapes["inputs"][1])
    arrays["weights"] = np.ones(shapes["weights"], np.float32)
    # JAX's random initialisation takes longer to compile than the step.
    shapes_of = jax.eval_shape(config.model.init_params, trainer.key)
    params = jax.tree.map(lambda x: 0.05 * rng.standard_normal(x.shape, np.float32), shapes_of)
    waiting, held, batch = [params], list[Tree](), put_batch(arrays, trainer.mesh)
    program, numbers = trainer.program(shapes), itertools.count(1)
    del params

    def step() -> float:
        if waiting:
            held.append(trainer.fresh(waiting.pop()))
            jax.block_until_ready(held)
        begun = time.perf_counter()
        held[0], values = program(held[0], batch, trainer.dropout_key(next(numbers)))
        jax.block_until_ready((held[0], values))
        return time.perf_counter() - begun

    return step


def measured_bytes(trainer: "Trainer", config: Config, *, steps: int = 3) -> tuple[float | None, float]:
    """Runs a few real steps on random tokens.

    Returns:
      The peak in bytes on the device with the highest one (None if a device does not report it), and the seconds of the
      last step.
    """
    step = stepper(trainer, config)
    seconds = [step() for _ in range(steps)][-1]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in trainer.mesh.devices.flat]
    return (max(p for p in peaks if p) if all(peaks) else None), seconds
