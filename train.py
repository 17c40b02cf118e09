"""Trains a T5 with the pipelined or the sequential objective.

    python train.py --config configs/demo.py --workdir runs/demo [--set train.steps=500 ...]

The same command again goes on from the newest good checkpoint.
"""

from collections.abc import Sequence

from pipejax import cli


def main(argv: Sequence[str]) -> int:
    """The command line; all logic is in `pipejax.training`."""
    parser = cli.Parser(prog="train.py", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="a config file, such as configs/demo.py")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="where checkpoints and the log go")
    parser.add_overrides("override a setting of the config, such as train.steps=500 (repeatable)")
    flags = parser.parse_args(argv)

    from pipejax import config as config_lib

    config = config_lib.load(flags.config, flags.overrides)

    from pipejax.training import fit  # starts JAX: after the flags and the config are known to be good

    return fit(config, flags.workdir, log=cli.note)


if __name__ == "__main__":
    cli.run(main)
