"""Decodes examples and scores them; the command does so for a split of a task.

    pipejax evaluate --checkpoint DIR --task msqa --split test --json OUT [--predictions FILE.jsonl]

Decodes one document at a time by default, as in the paper's throughput measurements; --batch-size is faster. The JSON
object has the scores, the steps, counts of cut sources and answers, examples per second (generation and detokenisation,
without compilation and tokenisation), peak memory, and scores, steps and seconds by the number of rows in the data.
"""

import functools
import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from pipejax import config as config_lib
from pipejax import metrics
from pipejax.config.row_names import columns_of
from pipejax.data import OWN_FILES, make_task
from pipejax.data.encoding import JOINED, TARGETS, describe_changes
from pipejax.data.examples import Example, Task, fingerprint
from pipejax.data.own_files import FilesTask
from pipejax.data.text import sentences
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference.answers import Record, texts
from pipejax.inference.generator import Generator
from pipejax.inference.lazy_programs import dtype_of
from pipejax.inference.loading import load
from pipejax.inference.report import Report
from pipejax.inference.sources import Source
from pipejax.methods import tells_rows_apart
from pipejax.metrics import exact
from pipejax.system import cli, distributed, strict_json
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress
from pipejax.system.strict_json import JsonObject

# A training evaluates many times, but logs the same warning only once.
_warn_once = functools.lru_cache(maxsize=64)(logging.getLogger(__name__).warning)


def evaluate(
    generator: Generator,
    examples: Sequence[Example],
    *,
    method: str | None = None,
    metric: str | None = None,
    batch_size: int = 8,
    tick: Callable[[int], None] = lambda count: None,
) -> tuple[JsonObject, list[Record]]:
    """Decodes a non-empty list of examples, and compares rows with targets by one of `metrics.HEADLINES`.

    Args:
      generator: the model.
      examples: the examples, the same in all processes.
      method: the name of the method; None: the generator's default.
      metric: the metric; None: the one of the config or its task.
      batch_size: sources per batch. With 1, each record gets its "seconds".
      tick: called with the number of answers after each batch, equally often in all processes.

    Returns:
      The results and the records. The results are the metric and its scores (percent); steps, sequential_steps and
      pipelined_steps (means; the value of the other method is the ideal for the same rows, or None if the rows cannot
      be told apart); step_ratio; examples_per_second (without compilation); compile_seconds; and the counts truncated
      and cut_sources. With a ROUGE metric and a blank separator, the rows are the sentences of the text, for both
      methods.
    """
    name = method or generator.default_method
    data, chosen = generator.config.data, generator.method(name)
    if generator.tokenizer is not None:  # warn: a target that the tokenizer changes cannot be generated exactly
        separator = data.separator if chosen.parts_text else ""
        for line in describe_changes(examples, generator.tokenizer, separator, kinds=(TARGETS, JOINED)):
            _warn_once(line)
    metric = metric or data.metric or make_task(data).metric
    records, report = decode_examples(generator, examples, method=name, metric=metric, batch_size=batch_size, tick=tick)
    scores = _score(generator, examples, records, metric)
    result = {
        "method": name,
        "strategy": name,  # the former name of the key, until the next release
        "examples": len(examples),
        "metric": metric,
        **scores,
        **report.summary(chosen),
    }
    return result, records


def decode_examples(
    generator: Generator,
    examples: Sequence[Example],
    *,
    method: str,
    metric: str,
    batch_size: int,
    tick: Callable[[int], None] = lambda count: None,
    times_encoder: bool = False,
) -> tuple[list[Record], Report]:
    """Decodes the examples, distributed over the processes; returns all records, in order, to all processes.

    Each process decodes an equal share, and every process decodes the remainder, so that `tick` is called equally often
    in all processes. The arguments are as for `evaluate`; `times_encoder` is a field of `Report`.
    """

    def decoded(part: Sequence[Example], report: Report) -> list[Record]:
        sources = [Source(e.id, e.source) for e in part]
        decode = partial(generator.stream, method=method, batch_size=batch_size, report=report, tick=tick)
        if batch_size > 1:
            return list(decode(sources))
        records: list[Record] = []
        for source in sources:  # one by one, to measure the seconds of each
            before = report.seconds
            for record in decode([source]):
                record["seconds"] = report.seconds - before
                records.append(record)
        return records

    index, count = jax.process_index(), jax.process_count()
    even, report = len(examples) // count * count, Report(times_encoder=times_encoder)
    records = decoded(examples[index:even:count], report)
    rest = decoded(examples[even:], report if index == 0 else Report())
    if count > 1:
        shares = [strict_json.loads(text) for text in distributed.gather_texts(json.dumps([records, vars(report)]))]
        records = [shares[i % count][0][i // count] for i in range(even)] + rest
        report = Report.of_all([Report(**numbers) for _, numbers in shares])
    if metrics.HEADLINES[metric] == "rougeLsum" and not tells_rows_apart(generator.config.data.separator):
        # ROUGE-Lsum depends on the sentence boundaries, which a sequential answer does not mark, so both methods'
        # texts are split by the same rule.
        for record in records:
            record["rows"] = sentences(record["text"] or "")
    return records, report


def score_documents(
    generator: Generator, examples: Sequence[Example], records: Sequence[Record], metric: str
) -> list[dict[str, float]]:
    """Returns the terms of each example for `metrics.combine`.

    For "exact" metrics, rows become names and values first.
    """
    readers: dict[str, Callable[[str], object]] = dict.fromkeys(generator.config.grid.row_names, exact.number_or_text)
    if generator.answer_format is not None and generator.tokenizer is not None:
        readers = {generator.tokenizer.decode([*row.beginning]): row.value for row in generator.answer_format.rows}
    read: Callable[[Sequence[str]], Any] = list
    if metric.startswith("exact"):
        read = partial(exact.named_rows, readers=readers, fold_case=metric != "exact")
    gold, predicted = [read(e.targets) for e in examples], [read(texts(record)) for record in records]
    return metrics.per_document(metric, [e.document or e.source for e in examples], gold, predicted)


def _score(
    generator: Generator, examples: Sequence[Example], records: Sequence[Record], metric: str
) -> dict[str, float]:
    """Returns the scores of the records by a metric."""
    documents = score_documents(generator, examples, records, metric)
    return metrics.combine(metric, metrics.total(documents), len(documents))


def by_rows(
    generator: Generator, examples: Sequence[Example], records: Sequence[Record], metric: str
) -> list[dict[str, float]]:
    """Returns the headline score, steps and, if known, seconds by the number of rows in the data (Figures 4, 5)."""
    groups: dict[int, list[int]] = {}
    for i, example in enumerate(examples):
        groups.setdefault(len(example.targets), []).append(i)
    table = []
    for rows, members in sorted(groups.items()):
        part = [examples[i] for i in members]
        scores = _score(generator, part, [records[i] for i in members], metric)
        headline = metrics.HEADLINES[metric]
        line: dict[str, float] = {"rows": rows, "documents": len(members), headline: scores[headline]}
        line["steps"] = sum(records[i]["steps"] for i in members) / len(members)
        if "seconds" in records[members[0]]:
            line["seconds"] = sum(records[i]["seconds"] for i in members) / len(members)
        table.append(line)
    return table


def by_column(generator: Generator, examples: Sequence[Example], records: Sequence[Record]) -> dict[str, float]:
    """Returns, for each column in `data.targets`, the percentage of cells that are correct by the metric "exact"."""
    config, found = generator.config, dict[str, float]()
    names = columns_of(config.data.columns, config.grid.row_names)
    readers = dict.fromkeys(names.values(), exact.number_or_text)

    def cells(rows: Sequence[exact.Row], name: str) -> list[str]:
        return exact.spell_rows([row for row in rows if not isinstance(row, str) and row[0] == name], fold_case=False)

    pairs = [
        (exact.named_rows(example.targets, readers), exact.named_rows(texts(record), readers))
        for example, record in zip(examples, records, strict=True)
    ]
    for column, name in names.items():
        right = sum(cells(gold, name) == cells(written, name) for gold, written in pairs)
        found[column] = 100 * right / len(examples)
    return found


def peak_memory() -> dict[str, int]:
    """Returns the peak bytes since the process started: of the fullest device, or else of the process.

    The peak includes loading. Loading needs no more memory of a device than the weights in the compute dtype and one
    layer in float32.
    """
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    if known := [peak for peak in peaks if peak]:
        return {"peak_device_bytes": max(known)}
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return {"peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax evaluate", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--task", help="task of the data (default: the task of the training)")
    parser.add_argument("--split", choices=("train", "dev", "test"), default="test")
    parser.add_method(config_lib.METHODS)
    parser.add_number("--batch-size", "documents decoded together (default: 1)", most=2**16, default=1)
    parser.add_number("--limit", "use only the first N documents")
    parser.add_argument("--skip-bad", action="store_true", help="skip bad lines, like --set data.skip_bad=true")
    parser.add_argument("--json", metavar="OUT", help="file for the results (default: standard output)")
    parser.add_argument(
        "--predictions", metavar="FILE", help="file for the decoded documents, with id, source, gold, pred, ..."
    )
    parser.add_overrides("override a setting of grid, decode or data (repeatable)")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    cli.check_output_file("--predictions", flags.predictions)
    ours = [a for a in flags.overrides if a.startswith("data.") and not a.startswith("data.separator")]
    others = [a for a in flags.overrides if a not in ours]

    generator = load(flags.checkpoint, best=flags.best, overrides=others)
    note_samples(generator)
    ours += ["data.skip_bad=true"] if flags.skip_bad else []
    examples, _ = examples_of(
        generator, flags.checkpoint, task=flags.task, split=flags.split, limit=flags.limit, overrides=ours
    )
    method = flags.method or generator.default_method
    progress = Progress("evaluating", len(examples), unit="example")
    size = generator.batch_size_for(min(flags.batch_size, len(examples)))
    result, records = evaluate(generator, examples, method=method, batch_size=size, tick=progress.add)
    progress.close()
    found = {
        "checkpoint": str(flags.checkpoint),
        "task": generator.config.data.task,
        "split": flags.split,
        "limit": flags.limit,
        **generator.origin,
        "batch_size": size,
        "dtype": dtype_of(generator.config).name,
        "beams": generator.config.decode.beams,
        "length_penalty": generator.config.decode.length_penalty,
        **result,
        **peak_memory(),
        "by_rows": by_rows(generator, examples, records, result["metric"]),
        **({"by_column": by_column(generator, examples, records)} if generator.config.data.columns else {}),
    }
    try:
        if flags.predictions:
            kept = _predictions(generator, examples, records, method)
            cli.write_output("--predictions", flags.predictions, kept)
    finally:  # if one output cannot be written, the other one is still written
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
        if flags.json:
            cli.write_output("--json", flags.json, text)
            headline = metrics.HEADLINES[result["metric"]]
            cli.note(f"{headline} {result[headline]:.2f}, {result['steps']:.1f} steps; written to {flags.json}")
        else:
            print(text, end="")
    return 0


def require_tokenizer(generator: Generator, directory: str) -> Tokenizer:
    """Returns the tokenizer of a checkpoint.

    Raises:
      UserError: the checkpoint in `directory` has no tokenizer.
    """
    if generator.tokenizer is None:
        expected = "a checkpoint with a tokenizer, to read and write text"
        raise UserError(directory, found="no tokenizer", expected=expected)
    return generator.tokenizer


def note_samples(generator: Generator) -> None:
    """Reports that a generator with several samples for each source decodes one of them for each example."""
    if (samples := generator.config.decode.samples) > 1:
        cli.note(f"decode.samples: found {samples}; one answer of each example is decoded and scored")


def examples_of(
    generator: Generator,
    checkpoint: str,
    *,
    task: str | None,
    split: str,
    limit: int | None,
    overrides: Sequence[str],
) -> tuple[Sequence[Example], str]:
    """Reads the examples of a split, and sets the data of the generator's config to theirs.

    Args:
      generator: the generator.
      checkpoint: the path of its checkpoint, for messages.
      task: the name of the task; None: the task of the training.
      split: the split.
      limit: the most examples; None: all.
      overrides: settings of the section data, as KEY=VALUE.

    Returns:
      The examples, and the name of the metric.

    Raises:
      UserError: the generator has no tokenizer, or the split has no examples.
    """
    require_tokenizer(generator, checkpoint)
    overrides = use_data(generator, task, overrides)
    data = generator.config.data
    read = _task_of(generator, checkpoint, split, overrides)
    metric = data.metric or read.metric
    metrics.require(metric)
    examples = read.examples(split)[:limit]
    if not len(examples):
        raise UserError(f"--split {split}", found="no examples", expected="at least one")
    same = data.split and generator.trained and generator.trained.data.train == data.train
    if same and generator.learned and generator.learned != fingerprint(read.examples("train"), None):
        cli.note(
            "warning: data.split: found training examples that differ from the run's; some "
            "evaluated documents may be among its training examples"
        )
    return examples, metric


def use_data(generator: Generator, task: str | None, overrides: Sequence[str]) -> Sequence[str]:
    """Sets the data of a generator's config; returns all settings that were set.

    The arguments are as for `examples_of`.
    """
    if task:  # the metric of the given task counts, not the metric of the checkpoint's task
        overrides = [f"data.task={task}", "data.metric=", *overrides]
    generator.config = config_lib.override(generator.config, overrides)
    return overrides


def _task_of(generator: Generator, checkpoint: str, split: str, overrides: Sequence[str]) -> Task:
    """Returns the task of a generator's config.

    Args:
      generator: the generator.
      checkpoint: the path of the checkpoint, for messages.
      split: the split to evaluate.
      overrides: the settings of data that were given as KEY=VALUE.

    Raises:
      UserError: there is no task, the split has no file, or a file is given for a task that has its own data.
    """
    data = generator.config.data
    if data.task == "none":
        raise UserError(
            checkpoint,
            "has no task, because pipejax did not train it",
            expected=f"a task, as in --task jsonl --set data.{split}=FILE",
        )
    task = make_task(data, generator.config.grid.row_names)
    if isinstance(task, FilesTask) and not task.has(split):
        raise UserError(
            f"data.{split}",
            found="no file",
            expected=f"one, as in --set data.{split}=FILE, or another --split",
        )
    if data.task not in OWN_FILES and any(a.partition("=")[0].strip() == f"data.{split}" for a in overrides):
        raise UserError(
            f"data.{split}",
            found="a file",
            expected=f"none, as {data.task} has its own data; use --task jsonl for a file",
        )
    return task


def _predictions(
    generator: Generator, examples: Sequence[Example], records: Sequence[Record], method: str | None = None
) -> str:
    """Returns the predictions as JSON lines, in the format that `pipejax metrics` reads."""
    lines, parts_text = [], generator.method(method or generator.default_method).parts_text
    separator = generator.config.data.separator if parts_text else ""
    for example, record in zip(examples, records, strict=True):
        line = {"id": example.id, "source": example.source, "gold": example.targets, "pred": texts(record)}
        about = {"document": example.document, "row_names": generator.config.grid.row_names, "separator": separator}
        more = {key: record[key] for key in ("text", "row_ids", "steps", "calls", "truncated")}
        lines.append(json.dumps({**line, **{k: v for k, v in about.items() if v}, **more}, ensure_ascii=False) + "\n")
    return "".join(lines)
