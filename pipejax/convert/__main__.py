"""The command line of `pipejax convert from-hf SRC OUT` and `pipejax convert to-hf CHECKPOINT OUT`."""

from collections.abc import Sequence

from pipejax.convert.huggingface import from_hf, to_hf
from pipejax.system.cli import Parser, run


def main(argv: Sequence[str]) -> int:
    """Runs `pipejax convert`; returns the exit code."""
    parser = Parser(prog="pipejax convert", description="T5 checkpoints, from and to Hugging Face")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{from-hf,to-hf}")
    incoming = commands.add_parser("from-hf", help="Hugging Face directory or hub id -> checkpoint")
    incoming.add_argument("source", metavar="SRC", help="directory with config.json and weights, or a hub id")
    outgoing = commands.add_parser("to-hf", help="checkpoint -> Hugging Face directory")
    outgoing.add_argument("source", metavar="CHECKPOINT", help="checkpoint or run directory")
    outgoing.add_argument("--best", action="store_true", help="the step of the best evaluation, not the newest")
    for command in (incoming, outgoing):
        command.add_argument("out", metavar="OUT", help="a new or an empty directory")
    args = parser.parse_args(argv)
    if args.command == "from-hf":
        from_hf(args.source, args.out)
    else:
        to_hf(args.source, args.out, best=args.best)
    return 0


if __name__ == "__main__":
    run(main)
