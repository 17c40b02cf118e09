"""All commands behind one name: `pipejax COMMAND ...`, or `python -m pipejax COMMAND ...`."""

# PYTHON_ARGCOMPLETE_OK: argcomplete looks for this word here

import argparse
import os
import sys
from collections.abc import Sequence

from pipejax import registry
from pipejax.registry import COMMANDS
from pipejax.system import cli
from pipejax.system.errors import UserError, did_you_mean
from pipejax.system.extras import extra


def main(argv: Sequence[str]) -> int:
    """Runs the command that is named first."""
    if cli.COMPLETING in os.environ:
        argv = [command_to_complete()]
    name = argv[0] if argv else "--help"
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name == "--version":
        from pipejax import __version__

        print(f"pipejax {__version__}")
        return 0
    if name not in COMMANDS:
        raise UserError(
            "pipejax", found=f"{name!r}", expected=f"one of {', '.join(COMMANDS)}", hint=did_you_mean(name, COMMANDS)
        )
    code: int = registry.find(COMMANDS[name][1]).main(argv[1:])
    return code


def command_to_complete() -> str:
    """The command on the line that a shell wants completed; its own parser answers for what follows it.

    While the command itself is being typed, the shell gets the names that fit, and the process ends.
    """
    with extra("completion", "completion"):
        import argcomplete
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    if len(words) == 2:
        parser = argparse.ArgumentParser()
        parser.add_argument("command", choices=COMMANDS)
        argcomplete.autocomplete(parser)
    os.environ[cli.COMPLETING] = "2"  # words that come before the flags
    return words[1]


def usage() -> str:
    """The list of commands."""
    lines = [
        (
            "usage: pipejax COMMAND ...   (without installation: python -m pipejax COMMAND; pipejax "
            "COMMAND --help describes one)"
        ),
        "",
    ]
    return "\n".join([*lines, *(f"  {name:<12}{what}" for name, (what, _) in COMMANDS.items())])


def script() -> None:
    """The console script `pipejax`."""
    cli.run(main)


if __name__ == "__main__":
    sys.argv[0] = "pipejax"
    script()
