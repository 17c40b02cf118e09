"""Trains a T5 with the pipelined or the sequential method.

    pipejax train --config configs/demo.py --workdir runs/demo [--set train.steps=500 ...]

The same command again continues from the newest intact step. Several processes, on one machine or many, find each
other when srun, mpirun or a Kubernetes JobSet starts them; otherwise pass the flags below (docs/clusters.md). Compiled
programs are cached in the user's cache directory, or in $PIPEJAX_CACHE if it is set ("off" disables it).
"""

import traceback
from collections.abc import Sequence

from pipejax import registry
from pipejax.system import cli, environment
from pipejax.system.extras import extra


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax train", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="a config file, such as configs/demo.py")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="directory for checkpoints and the log")
    parser.add_overrides(
        "override a setting (repeatable), such as train.steps=500; pipejax/config/sections.py lists all"
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip bad lines, like --set data.skip_bad=true")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="try config, data, memory and the first step, then stop without writing anything",
    )
    parser.add_argument(
        "--profile",
        type=cli.whole_number(0),
        default=0,
        metavar="STEPS",
        help="number of steps to trace into DIR/profile",
    )
    several = parser.add_argument_group("several processes (or PIPEJAX_COORDINATOR, PIPEJAX_PROCESSES, ...)")
    several.add_argument(
        "--alone", action="store_true", help="train in one process, even in a cluster or under a launcher"
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address where process 0 listens")
    several.add_argument("--processes", type=cli.whole_number(1, 2**20), metavar="N", help="number of processes")
    several.add_argument(
        "--process-id", type=cli.whole_number(0, 2**20), metavar="I", help="number of this process, from 0"
    )
    several.add_argument(
        "--heartbeat",
        type=cli.whole_number(1, 86400),
        default=60,
        metavar="SECONDS",
        help="seconds without a sign of life after which a process counts as dead (default: 60)",
    )
    flags = parser.parse_args(argv)

    from pipejax import config as config_lib

    skip = ["data.skip_bad=true"] if flags.skip_bad else []
    config = config_lib.load(flags.config, [*flags.overrides, *skip])

    from pipejax.system import distributed  # imports JAX, so it follows the checks of the flags and the config

    told = flags.coordinator, flags.processes, flags.process_id
    joined = distributed.join_processes(*told, heartbeat=flags.heartbeat, alone=flags.alone)

    def explain(error: BaseException) -> int:
        code = cli.explain(error, debug=flags.debug)
        if distributed.lost(error):
            cli.note("error: another process of this run has ended; start all processes again to continue")
            return 1
        if code == cli.EXIT_OUR_MISTAKE:
            traceback.print_exception(error)
        return code

    with distributed.alone(explain, joined=joined):
        from pipejax.system import compile_cache, trials

        trials.try_kernels_early(trains=True)
        environment.check_environment()
        require_libraries()
        from pipejax.training.loop import fit

        if not distributed.first():
            cli.mute()
        compile_cache.use_cache()
        if flags.dry_run:
            return int(registry.find(registry.DRY_RUN)(config, flags.workdir))
        return fit(config, flags.workdir, profile=flags.profile)


def require_libraries() -> None:
    """Raises a UserError if grain is not installed; `data.batches` would import it only after the model is built."""
    with extra("train", "training"):
        import grain  # noqa: F401
