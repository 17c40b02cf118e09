"""Trains on a T5's answers to texts without labels: the T5 itself, to write rows, or a small T5 or tagger that drafts.

    pipejax teach --checkpoint SEQUENTIAL --input SOURCES.jsonl --workdir DIR [--set ...]
    pipejax teach --checkpoint ROWS --tagger --input SOURCES.jsonl --workdir DIR [--set ...]
    pipejax teach --checkpoint LARGE --student STUDENT --workdir DIR [--input SOURCES.jsonl] [--set ...]

The checkpoint answers the sources, its answers are split at data.separator, and the same weights are trained to write
these rows with the pipelined decoder. DIR/agreement.json reports how well the answers of the checkpoint and of the run
agree on held-out sources.

With --student, a small T5 is trained on the answers of the checkpoint, for decode.draft=model with
decode.draft_checkpoint=DIR. DIR/drafting.json reports the decoder calls that the small T5 saves on held-out sources.

With --tagger, the checkpoint is frozen, and a tagger that finds the rows of answers in their sources is trained for
decode.draft=spans. DIR/tagger.json reports the decoder calls that the tagger saves on held-out sources.

DIR is a run directory as written by pipejax train. After an interruption, the same command continues the run.
"""

from collections.abc import Sequence

from pipejax.system import cli, environment
from pipejax.system.errors import UserError


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax teach", description=__doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a sequential WORKDIR of pipejax train, or a converted T5; with --student, of any method that can draft",
    )
    parser.add_argument(
        "--student",
        metavar="STUDENT",
        help="the small T5: a number of decoder layers, which share the encoder of the checkpoint; the directory of a "
        "small T5 to start from; or a config with `model` and `train`",
    )
    parser.add_argument(
        "--tagger", action="store_true", help="train the tagger of decode.draft=spans for a checkpoint that writes rows"
    )
    parser.add_argument("--best", action="store_true", help="use the best evaluated step instead of the newest")
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="sources, as pipejax decode reads them (default with --student: the checkpoint's training examples)",
    )
    parser.add_argument("--workdir", required=True, metavar="DIR", help="directory for labels, checkpoints and the log")
    parser.add_number(
        "--held-out", "number of sources that are kept out of training and measured (default: a tenth, at most 512)"
    )
    parser.add_overrides(
        "override a setting of grid, decode, train or mesh, or one of data that docs/teaching.md names (repeatable)"
    )
    flags = parser.parse_args(argv)

    from pipejax.offline import records

    if flags.tagger and flags.student is not None:
        raise UserError("--tagger", found="--student as well", expected="one of them")
    if flags.input is None and flags.student is None:
        raise UserError("--input", found="none", expected="a file of sources")
    if flags.input == records.STANDARD:
        raise UserError("--input -", found="standard input", expected="a file, which can be read again")
    if flags.input is not None:
        records.check_input(flags.input)

    from pipejax.system import trials

    trials.try_kernels_early(trains=True)
    environment.check_environment()

    from pipejax.training.train_command import require_libraries

    require_libraries()

    settings = {"best": flags.best, "held_out": flags.held_out, "overrides": flags.overrides}
    if flags.student is not None:
        from pipejax.apps.teach.students import teach_student

        return teach_student(flags.checkpoint, flags.student, flags.input or "", flags.workdir, **settings)
    if flags.tagger:
        from pipejax.apps.teach.tagging import teach_tagger

        return teach_tagger(flags.checkpoint, flags.input, flags.workdir, **settings)
    from pipejax.apps.teach.lessons import teach

    return teach(flags.checkpoint, flags.input, flags.workdir, **settings)
