"""Prints the choices of `train.remat=auto` for GPUs of several sizes, from the estimates of `pipejax plan`, on any CPU.

    python -m lab.benchmarks.cards [--json OUT]

Training steps of T5-Base and T5-Large are estimated for each choice, as `pipejax plan` estimates them on a GPU. JAX
takes three quarters of a card, and "auto" takes the fastest choice that leaves a quarter of that free.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from lab.benchmarks.programs import TRAININGS, Training
from lab.benchmarks.systems import SIZES, save
from pipejax.apps.plan import step_memory
from pipejax.config import REMATS, Config
from pipejax.methods import losses
from pipejax.model.slots import Blocks
from pipejax.system import cli
from pipejax.training import memory, step

CARDS = {"RTX 4090 (24 GB)": 23.6, "A100 (40 GB)": 39.4, "H100 (80 GB)": 79.1, "H200 (141 GB)": 139.8}  # GiB in total
STEPS = {
    "Base, 24 sources of 2,048 in four parts": TRAININGS["paper"]._replace(model=SIZES["base"]),
    "Base, 24 sources of 2,048 at once": TRAININGS["paper"]._replace(model=SIZES["base"], accumulate=1),
    "Large, 24 sources of 4,096 in four parts": TRAININGS["large"],
}


def main(argv: Sequence[str]) -> int:
    """Estimates each step, prints a line for each step and card, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.cards", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    results = [row for name, training in STEPS.items() for row in rows(name, training)]
    for row in results:
        sizes = ", ".join(f"{remat} {gib:.1f}" for remat, gib in row["gib"].items())
        print(f"{row['step']:<42} {row['card']:<18} {row['jax_gib']:6.1f} GiB for JAX: {row['remat']:<7} ({sizes})")
    if flags.json:
        save(flags.json, {"results": results, "command": "python -m lab.benchmarks.cards"})
    return 0


def rows(name: str, training: Training) -> Iterator[dict[str, Any]]:
    """The choice for a step on each card, and the estimates of all choices in GiB."""
    chosen = training.config
    auto = with_remat(dataclasses.replace(chosen, train=dataclasses.replace(chosen.train, dtype="bfloat16")), "auto")
    with on_gpu():
        estimate = memory.estimator(step.Trainer(auto))
    sizes = {remat: sum(estimate(with_remat(auto, remat)).values()) / memory.GIB for remat in REMATS[1:]}
    # A trainer takes seconds to make, and its estimate is the same for all cards.
    with mock.patch.object(step, "Trainer"), mock.patch.object(memory, "estimator", return_value=estimate):
        for card, gib in CARDS.items():
            there = step_memory.SHARE * gib
            remat = memory.choose_remat(auto, there * memory.GIB).train.remat
            fits = sizes[remat] <= there
            yield {"step": name, "card": card, "jax_gib": there, "gib": sizes, "remat": remat, "fits": fits}


def with_remat(config: Config, remat: str) -> Config:
    """Returns the config with another `train.remat`."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, remat=remat))


@contextlib.contextmanager
def on_gpu() -> Iterator[None]:
    """A context in which trainers on a CPU have the attention and the parts of the loss that they have on a GPU."""
    blocks = mock.patch.object(step, "choose_blocks", return_value=Blocks())
    logits = mock.patch.object(losses, "most_logits", return_value=losses.GPU_LOGITS)
    with blocks, logits:
        yield


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
