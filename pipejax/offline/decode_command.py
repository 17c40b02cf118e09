"""Decodes a file of sources with a trained or converted checkpoint.

    pipejax decode --checkpoint runs/demo --input FILE.jsonl --output OUT.jsonl [--method sequential] [--set ...]

Input lines are {"id", "source"} or {"id", "source_ids"}, or have the fields that the task builds its source from, such
as "question" and "context"; "-" is standard input or output. The extensions of both file names select CSV or Parquet.
Compiled programs are cached in the user's cache directory, or in $PIPEJAX_CACHE if it is set ("off" disables it).
"""

from collections.abc import Sequence

from pipejax.system import cli


def main(argv: Sequence[str]) -> int:
    from pipejax.config import METHODS

    parser = cli.Parser(prog="pipejax decode", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="JSON lines, CSV (also compressed), Parquet, a saved data set; - for standard input",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON lines, or .csv, .tsv, .parquet, or -")
    parser.add_method(METHODS)
    parser.add_number(
        "--batch-size",
        "sources decoded together (default: decode.batch_size; 1 for standard input; at most 8 on a CPU)",
        most=2**16,
    )
    parser.add_argument("--resume", action="store_true", help="keep the records of an interrupted run, and continue")
    parser.add_argument("--skip-bad", action="store_true", help="skip invalid lines, and report their number")
    parser.add_argument("--schema", metavar="FILE", help="a flat JSON schema that each answer follows")
    parser.add_argument("--stream", action="store_true", help="print rows while they are decoded, one source at a time")
    parser.add_number("--num-samples", "answers per source (default: decode.samples)", most=2**16)
    parser.add_overrides("override a setting of grid or decode, or one of data that docs/decoding.md has (repeatable)")
    flags = parser.parse_args(argv)

    from pipejax.offline import records

    records.check_paths(flags.input, flags.output, resume=flags.resume)

    from pipejax.inference.loading import (
        load,  # imports JAX, so it follows the checks of the flags and the input's path
    )

    samples = [f"decode.samples={flags.num_samples}"] if flags.num_samples else []
    generator = load(flags.checkpoint, best=flags.best, overrides=[*flags.overrides, *samples])
    records.decode_file(
        generator.under(flags.schema, flags.method) if flags.schema else generator,
        flags.input,
        flags.output,
        method=flags.method,
        batch_size=flags.batch_size,
        resume=flags.resume,
        live=flags.stream,
        skip_bad=flags.skip_bad,
    )
    return 0
