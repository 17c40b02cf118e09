"""Trains a T5: `python train.py --config configs/demo.py --workdir runs/demo`; `pipejax train` is the same."""

from pipejax.system import cli
from pipejax.training.train_command import main as main

if __name__ == "__main__":
    cli.run(main)
