"""Measures how much the rows of labelled answers depend on each other, before a model is trained to write rows.

    pipejax probe --checkpoint RUN --input DEV.jsonl --adapt TRAIN.jsonl --output DIR [--resume] [--set ...]

Each token of the answers is scored with the earlier rows visible completely, as far as Δt = 4, 2, 1 and 0 allow, and
hidden. Before that, a copy of the weights is trained on other examples for a few hundred updates to cope with hidden
rows. DIR/index.html is the page with the results, DIR/probe.json has its numbers, and DIR/examples.jsonl the numbers of
each token. The checkpoint must be a sequential one: a model that writes rows has only ever seen as much as its Δt
allows.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.files import look, make_directories, sweep

logger = logging.getLogger(__name__)

EXAMPLES, NUMBERS, PAGE = "examples.jsonl", "probe.json", "index.html"
ADAPTED = "adapted-"  # weights that are kept until the work is complete
UPDATES = 500


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax probe", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--input", required=True, metavar="FILE", help="labelled examples to measure")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="a new directory, or one of an unfinished pipejax probe"
    )
    parser.add_argument(
        "--adapt", metavar="FILE", help="labelled examples to adapt the model to first, none of them in --input"
    )
    parser.add_number("--updates", f"updates of the adaptation (default: {UPDATES})", default=UPDATES)
    parser.add_number("--batch-size", "examples measured together (default: 8)", most=2**16, default=8)
    parser.add_number("--limit", "use only the first N examples of --input")
    parser.add_argument(
        "--resume", action="store_true", help="keep the measurements of an interrupted run, and continue"
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip invalid lines, and report their number")
    parser.add_overrides("override a setting of data, train.learning_rate, a dtype, or method (repeatable)")
    flags = parser.parse_args(argv)
    output = Path(flags.output)
    check_directory(output)

    from pipejax.offline import records

    for flag in ("input", "adapt"):
        if (given := getattr(flags, flag)) == records.STANDARD:
            raise UserError(f"--{flag} -", found="standard input", expected="a file")
        if given:
            records.check_input(given, f"--{flag}")

    from pipejax.apps.probe import measuring, probe_page  # imports JAX, so it follows the checks of the flags and paths
    from pipejax.apps.probe.adaptation import BATCH, adapt
    from pipejax.offline.resume import Unfinished

    overrides = [*flags.overrides, *(["data.skip_bad=true"] if flags.skip_bad else [])]
    work = measuring.prepare(
        flags.checkpoint,
        flags.input,
        flags.adapt,
        best=flags.best,
        limit=flags.limit,
        most=flags.updates * BATCH,
        overrides=overrides,
    )
    updates = flags.updates if flags.adapt else 0
    settings = measuring.probe_settings(work) | {"--updates": updates}
    unfinished = Unfinished(str(output / EXAMPLES), settings)
    if flags.resume:
        unfinished.resume([example.id for example in work.examples])
    make_directories(output)
    if not flags.resume:
        sweep(output, EXAMPLES, f"{ADAPTED}*")
    if flags.adapt:
        place = output / f"{ADAPTED}{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]}"
        asked = measuring.conditions(work.targets)
        learned = adapt(work.config, work.params, work.lessons, asked, flags.updates, place)
        work = dataclasses.replace(work, params=learned)
    else:
        logger.warning("without --adapt, costs measure more than dependence, because no row was hidden in training")
    found: measuring.Found = {
        "checkpoint": flags.checkpoint,
        "input": flags.input,
        "adapt": flags.adapt,
        "updates": updates,
        "step": work.step,
        "params_fp": work.params_fp,
        **measuring.measure(work, unfinished, batch_size=flags.batch_size),
    }
    cli.write_output("--output", str(output / NUMBERS), json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    cli.write_output("--output", str(output / PAGE), probe_page.html(found))
    sweep(output, f"{ADAPTED}*")
    known = found["chance"] is None or found["nll"]["whole"] < found["chance"]
    logger.log(logging.INFO if known else logging.WARNING, found["says"])
    cli.note(f"{output / PAGE}: {found['examples']} examples, {found['tokens']} tokens")
    return 0


def check_directory(output: Path) -> None:
    """Raises a UserError unless the directory is absent, empty, or written by this command."""
    kind = look(output, "--output")
    if kind == "file":
        raise UserError(f"--output {output}", found="a file", expected="a directory")
    ours = [path for name in (EXAMPLES, NUMBERS, f"{ADAPTED}*") for path in output.glob(name)]
    if kind and not ours and any(output.iterdir()):
        raise UserError(
            f"--output {output}",
            found="a directory with other files",
            expected="a new or empty directory, or one of an unfinished pipejax probe",
        )
