"""Writes a checkpoint's decoding as files that JAX alone loads and runs, without pipejax, Flax or transformers.

    pipejax export --checkpoint runs/demo exported [--platforms cpu,cuda] [--batch 8] [--source 512]

OUT gets a program for each method and platform, the weights, and export.json, which describes them. A program takes
batches of one fixed shape. docs/export.md shows how to load it.
"""

import argparse
from collections.abc import Sequence

from pipejax.system import cli
from pipejax.system.errors import did_you_mean, in_parentheses

PLATFORMS = ("cpu", "cuda", "tpu")


def platforms(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of platforms; an argparse type."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in PLATFORMS:
            expected = f"some of {','.join(PLATFORMS)}{in_parentheses(did_you_mean(name, PLATFORMS))}"
            raise argparse.ArgumentTypeError(f"found {name!r}; expected {expected}")
    return names


def main(argv: Sequence[str]) -> int:
    from pipejax.config import METHODS

    parser = cli.Parser(prog="pipejax export", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("out", metavar="OUT", help="a new or empty directory")
    parser.add_method(METHODS, repeatable=True)
    parser.add_number("--batch", "sources per call; default: decode.batch_size", most=2**16)
    parser.add_number("--source", "maximum tokens per source; default: data.max_source", least=2, most=2**20)
    parser.add_argument(
        "--platforms",
        type=platforms,
        default=("cpu",),
        metavar="LIST",
        help="comma-separated, of cpu,cuda,tpu; default: cpu",
    )
    parser.add_overrides("override a setting of grid or decode (repeatable)")
    flags = parser.parse_args(argv)

    from pipejax.apps.export.programs_as_files import export  # imports JAX, so it follows the checks of the flags

    export(
        flags.checkpoint,
        flags.out,
        platforms=flags.platforms,
        names=flags.method,
        batch=flags.batch,
        length=flags.source,
        best=flags.best,
        overrides=flags.overrides,
    )
    return 0
