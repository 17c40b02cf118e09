"""Lists or removes the results of trials on this machine's GPUs.

pipejax trials [--remove]
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipejax.system import cli
from pipejax.system.errors import UserError, first_line
from pipejax.system.files import read_small, sweep
from pipejax.system.strict_json import loads


def main(argv: Sequence[str]) -> int:
    """Runs `pipejax trials`."""
    parser = cli.Parser(
        prog="pipejax trials", description="List or remove the results of trials on this machine's GPUs."
    )
    parser.add_argument("--remove", action="store_true", help="remove all verdicts; trials are repeated when needed")
    flags = parser.parse_args(argv)

    from pipejax.system import compile_cache

    cache = compile_cache.directory()
    files = sorted((cache / "verdicts").glob("*.json")) if cache else []
    if flags.remove:
        sweep(cache / "verdicts", "*.json") if cache else None
        print(f"{len(files)} removed")
        return 0
    for line in _lines(files):
        print(line)
    return 0


def _lines(files: Sequence[Path]) -> Iterator[str]:
    """Yields a line for each verdict."""
    for path in files:
        try:
            found = loads(read_small(path))
            of = f"{', '.join(found['facts']['gpus'])}, driver {found['facts']['driver']}"
            yield f"{found['made']}  {found['trial']}: {found['choice']} ({found['reason']}) on {of}"
        except (OSError, UserError, ValueError, KeyError, TypeError) as error:
            yield f"{path}: not a verdict of a trial ({first_line(error)})"
