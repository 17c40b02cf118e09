"""Prepares published data sets, and prints statistics of a task's data.

    pipejax data prepare TASK --manual-dir DIR [--data-dir DIR]
    pipejax data stats TASK [--data-dir DIR] [--tokenizer DIR] [--split NAME] [--skip-bad] [--set KEY=VALUE ...]

`prepare` reads the publisher's files in --manual-dir and writes the data set for training to --data-dir (by default to
the directory of TFDS, ~/tensorflow_datasets). If files are absent, the error lists the files that TASK needs. `stats`
uses the task's length limits unless --set changes them; without a tokenizer it counts only words.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from pipejax import config as config_lib
from pipejax import registry
from pipejax.apps.statistics.split_statistics import measure_split, table_lines
from pipejax.config import Config, DataConfig
from pipejax.data import OWN_FILES, PAPERS, TASKS, make_task
from pipejax.data.encoding import answered
from pipejax.data.own_files import SPLITS
from pipejax.data.tokenizer import Tokenizer
from pipejax.system import cli
from pipejax.system.errors import UserError, did_you_mean
from pipejax.system.progress import Progress


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax data", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="{prepare,stats}", required=True, parser_class=cli.Parser)
    prepare = commands.add_parser("prepare", help="write a published data set in the form that training reads")
    prepare.add_argument("task", metavar="TASK", help=", ".join(PAPERS))
    prepare.add_argument("--manual-dir", default="", metavar="DIR", help="directory of the publisher's files")
    prepare.add_argument("--data-dir", default="", metavar="DIR", help="directory to write to")
    stats = commands.add_parser(
        "stats", help="sizes, words and tokens of a task's splits, and the share that bounds truncate"
    )
    stats.add_argument("task", metavar="TASK", help=", ".join(TASKS))
    stats.add_argument("--data-dir", default="", metavar="DIR", help="directory of prepared data sets")
    stats.add_argument("--tokenizer", default="", metavar="DIR", help="directory or hub id (default: count words only)")
    stats.add_argument("--split", choices=SPLITS, help="measure only this split")
    stats.add_argument("--skip-bad", action="store_true", help="skip bad lines, like --set data.skip_bad=true")
    stats.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    stats.add_overrides("override a setting, such as grid.time_max=50 or data.train=train.jsonl (repeatable)")
    flags = parser.parse_args(argv)
    known = PAPERS if flags.command == "prepare" else TASKS
    if flags.task not in known:
        hint = did_you_mean(flags.task, known)
        raise UserError("TASK", found=f"{flags.task!r}", expected=f"one of {', '.join(known)}", hint=hint)
    if flags.command == "stats":
        return _stats(flags)
    prepare_data_set = registry.find(registry.PREPARE)
    print(prepare_data_set(flags.task, manual_dir=flags.manual_dir, data_dir=flags.data_dir))
    return 0


def _stats(flags: argparse.Namespace) -> int:
    """Prints the statistics of a task's splits."""
    config = Config(data=DataConfig(task=flags.task, data_dir=flags.data_dir, tokenizer=flags.tokenizer))
    if flags.task in PAPERS:
        published: Any = make_task(config.data)
        config = published.bounded(config)
    config = config_lib.override(config, [*flags.overrides, *(["data.skip_bad=true"] if flags.skip_bad else [])])
    task = make_task(config.data, config.grid.row_names)
    examples = {split: task.examples(split) for split in ([flags.split] if flags.split else SPLITS)}
    examples = {split: found for split, found in examples.items() if len(found)}
    if not examples:
        wanted = f"split {flags.split!r}" if flags.split else "split"
        files = flags.task in OWN_FILES
        expected = f"a file, as in --set data.{flags.split or 'train'}=FILE" if files else "one"
        raise UserError("data.task", found=f"no {wanted} of {flags.task} with examples", expected=expected)
    tokenizer = Tokenizer.load(config.data.tokenizer) if config.data.tokenizer else task.tokenizer()
    if tokenizer is None:
        cli.note("no --tokenizer: only words are counted")
    result = {}
    for split, found in examples.items():
        if split == "train" and config.data.empty_targets != "keep":  # with "keep", the table shows their number
            found = answered(found, tokenizer, config.data.empty_targets)
        progress = Progress(f"reading {split}", len(found), unit="example")
        result[split] = measure_split(found, tokenizer, config.data, config.grid, tick=progress.add)
        progress.close()
    if flags.json:
        bounds = {key: getattr(config.grid, key) for key in ("delay", "time_max", "sub_max")}
        print(json.dumps({"task": flags.task, **bounds, "splits": result}, indent=2))
    else:
        print("\n".join(table_lines(result)))
    return 0


if __name__ == "__main__":
    cli.run(main)
