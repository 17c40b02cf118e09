"""The commands `pipejax convert from-hf SRC OUT`, `to-hf CHECKPOINT OUT` and `quantize CHECKPOINT OUT`."""

from collections.abc import Sequence

from pipejax import config
from pipejax.convert.description import add_origin
from pipejax.convert.huggingface import from_hf, to_hf
from pipejax.convert.quantized import quantize
from pipejax.data import hub
from pipejax.system.cli import Parser, run


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="pipejax convert", description="T5 checkpoints, from and to Hugging Face, and to fewer bytes")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{from-hf,to-hf,quantize}")
    incoming = commands.add_parser("from-hf", help="Hugging Face directory or hub id -> checkpoint")
    incoming.add_argument("source", metavar="SRC", help="directory with config.json and weights, or a hub id")
    incoming.add_argument(
        "--base-model",
        default="",
        metavar="NAME",
        help="name or directory of the adapted model (default: the name in the adapter)",
    )
    incoming.add_argument("--revision", default="", metavar="R", help="branch, tag or commit on the hub; or SRC@R")
    outgoing = commands.add_parser("to-hf", help="checkpoint -> Hugging Face directory")
    smaller = commands.add_parser("quantize", help="checkpoint -> smaller checkpoint for decoding")
    for command in (outgoing, smaller):
        command.add_argument("source", metavar="CHECKPOINT", help="checkpoint or run directory")
        command.add_argument(
            "--best", action="store_true", help="use the step of the best evaluation instead of the newest"
        )
    for command in (incoming, outgoing, smaller):
        command.add_overrides()
        command.add_argument("out", metavar="OUT", help="a new or empty directory")
    outgoing.add_argument("--adapter", action="store_true", help="write only the LoRA factors, in PEFT's format")
    add_origin(outgoing)
    smaller.add_argument(
        "--weights",
        choices=["int8", "bfloat16"],
        default="int8",
        help="type that weights are rounded to (default: int8)",
    )
    args = parser.parse_args(argv)
    backbone = config.backbone(args.overrides)
    if args.command == "from-hf":
        size = from_hf(hub.at(args.source, args.revision), args.out, backbone, base_model=args.base_model)
        print(f"{args.out}: {size}")
    elif args.command == "to-hf":
        given = {"best": args.best, "base_model": args.base_model, "scores": args.scores, "license": args.license}
        print(f"{args.out}: {to_hf(args.source, args.out, **given, adapter=args.adapter)}")
    else:
        quantize(args.source, args.out, weights=args.weights, best=args.best)
    return 0


if __name__ == "__main__":
    run(main)
