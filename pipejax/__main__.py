"""All commands behind one name: `pipejax COMMAND ...`, or `python -m pipejax COMMAND ...`."""

# PYTHON_ARGCOMPLETE_OK: argcomplete looks for this word here

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from pipejax.system import cli
from pipejax.system.errors import UserError, did_you_mean
from pipejax.system.extras import extra

# What each does, and the module whose `main` it is; that is imported only when it is asked for.
COMMANDS = {
    "train": ("train a T5, or go on with a run", "pipejax.training.train_command"),
    "teach": ("teach a sequential T5 to write rows, from texts without labels", "pipejax.apps.teach.teach_command"),
    "decode": ("decode a file of sources", "pipejax.offline.decode_command"),
    "serve": ("answer requests over HTTP", "pipejax.apps.serving.serve_command"),
    "bulk": ("decode many files by several processes", "pipejax.apps.bulk.bulk_command"),
    "evaluate": ("decode a split of a task and score it", "pipejax.offline.evaluation"),
    "export": ("decoding as files that JAX alone runs", "pipejax.apps.export.export_command"),
    "convert": ("weights from and to Hugging Face, and to fewer bytes", "pipejax.convert.__main__"),
    "push": ("share a run as a model of the Hugging Face hub", "pipejax.apps.hub.push_command"),
    "plan": ("what a training will need of each device's memory", "pipejax.training.memory"),
    "data": ("prepare published data sets; count what a split holds", "pipejax.data.__main__"),
    "metrics": ("score a file of predictions", "pipejax.metrics.__main__"),
    "checkpoint": ("verify the steps of a run", "pipejax.checkpoint.__main__"),
    "compare": ("the evaluations of several runs side by side", "pipejax.training.compare"),
    "probe": ("measure how much the rows of labelled answers need one another", "pipejax.apps.probe.probe_command"),
    "picture": ("draw a record's grid, or the curves of runs, as a page", "pipejax.apps.picture.picture_command"),
}


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
        raise UserError(f"pipejax: found {name!r}; expected one of {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}")
    code: int = importlib.import_module(COMMANDS[name][1]).main(argv[1:])
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
    lines = ["usage: pipejax COMMAND ...   (not installed: python -m pipejax COMMAND; --help behind it says more)", ""]
    return "\n".join([*lines, *(f"  {name:<12}{what}" for name, (what, _) in COMMANDS.items())])


def script() -> None:
    """The console script `pipejax`."""
    cli.run(main)


if __name__ == "__main__":
    sys.argv[0] = "pipejax"
    script()
