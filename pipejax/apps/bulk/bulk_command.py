"""Decodes many files of sources with several processes, on one machine or on a cluster, and continues after a kill.

    pipejax bulk --checkpoint runs/demo --input 'articles/*.jsonl' --output decoded [--workers 2] [--set ...]

Input files are JSON lines or CSV, optionally compressed, or Parquet, as for `pipejax decode`. Each block of lines
becomes a file in OUTPUT/shards with the records that `pipejax decode` would write. The same command again decodes only
the missing blocks. OUTPUT/manifest.json lists the shards. Requires the library Ray, which the extra pipejax[ray]
installs.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from pipejax.system import cli
from pipejax.system.files import absolute


def main(argv: Sequence[str]) -> int:
    from pipejax.config import METHODS

    parser = cli.Parser(prog="pipejax bulk", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="GLOB",
        help="files of JSON lines, CSV (also compressed) or Parquet",
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="a new directory, or the directory of an interrupted run to continue",
    )
    parser.add_method(METHODS)
    parser.add_number(
        "--workers", "number of decoding processes (default: one per GPU or TPU, else one per machine)", most=2**16
    )
    parser.add_number("--block", "lines per shard; default: 1000", most=2**31, default=1000)
    parser.add_argument("--skip-bad", action="store_true", help="skip invalid lines, and report their number")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="address of a Ray cluster (default: $RAY_ADDRESS, else no cluster)"
    )
    parser.add_overrides("override a setting of grid or decode, or one of data that docs/decoding.md has (repeatable)")
    flags = parser.parse_args(argv)

    from pipejax.apps.bulk import ray_pool, workers
    from pipejax.apps.bulk.shards import Output

    files, output = workers.match_files(flags.input), Output(Path(flags.output))
    work = workers.BulkWork(
        checkpoint=str(absolute(flags.checkpoint)),
        output=str(absolute(flags.output)),
        root=os.getcwd(),
        best=flags.best,
        overrides=tuple(flags.overrides),
        method=flags.method,
        skip_bad=flags.skip_bad,
    )
    with ray_pool.start(flags.address, flags.workers) as pool:
        workers.decode_files(work, files, output, pool, block=flags.block)
    return 0
