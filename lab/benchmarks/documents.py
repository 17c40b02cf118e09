"""Decodes a file of real documents end to end with pipejax and with other systems, with the same random weights.

    python -m lab.benchmarks.documents msqa_test.jsonl --tokenizer t5_tokenizer --model base --weights float32,int8 \
        --peers hf,ct2-int8 --json OUT

A line of the file has "source" and "targets". Every answer is forced to as many rows, of the same lengths, as its
targets have. The time is measured from the text of the source to the text of the answer. The systems take turns
document by document, or batch by batch; the sources of a batch have similar lengths. Programs compile before that.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.benchmarks.decode import OURS
from lab.benchmarks.peers.ct2 import CTranslate2
from lab.benchmarks.peers.hugging_face import HuggingFace
from lab.benchmarks.peers.process import check_lengths, torch_device
from lab.benchmarks.peers.vocabulary import ids_of, words_of
from lab.benchmarks.systems import (
    SIZES,
    SUFFIXES,
    Pipejax,
    build_each,
    machine,
    names_of,
    random_params,
    save,
    settle,
    use_threads,
    write,
)
from pipejax.data.lines import read_objects, text_of
from pipejax.data.shapes import bucket, pad
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Pipelined, Sequential
from pipejax.grid import sequential_steps
from pipejax.system import cli, compile_cache
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

PEERS = ("hf", "hf-bf16", "hf-int8", "hf-compiled", "ct2-fp32", "ct2-int8")
Batch = tuple[list[str], list[list[int]]]  # sources, and the lengths of the rows of each answer


def main(argv: Sequence[str]) -> int:
    """Measures the systems, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.documents", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="JSON lines with source and targets")
    parser.add_argument("--tokenizer", required=True, metavar="DIR")
    parser.add_argument("--model", choices=SIZES, default="base")
    parser.add_argument("--batch", type=int, default=1, metavar="B")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N documents")
    parser.add_argument("--max-source", type=int, default=2048, metavar="L", help="longer sources are cut (2048)")
    parser.add_argument(
        "--weights",
        default="float32",
        metavar="NAME,...",
        help=f"weights of pipejax, some of {', '.join(SUFFIXES)} (float32)",
    )
    parser.add_argument("--peers", default="hf", metavar="NAME,...", help=f"of {', '.join(PEERS)} (hf)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of each system (2)")
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    weights, peers = names_of("--weights", flags.weights, SUFFIXES), names_of("--peers", flags.peers, PEERS)
    if flags.batch > 1 and any(name.startswith("ct2") for name in peers):
        raise UserError(
            "--peers", found="CTranslate2 with batches, whose answers must have one length", expected="--batch 1"
        )
    use_threads(flags.threads)
    compile_cache.use_cache()
    tokenizer = Tokenizer.load(Path(flags.tokenizer))
    documents = [
        (text, [n for target in targets if (n := len(tokenizer.encode(target)))])
        for text, targets in itertools.islice(answers(flags.file), flags.limit or None)
    ]
    if not documents:
        raise UserError(flags.file, found="no lines", expected="at least one document")
    documents.sort(key=lambda d: len(d[0]))
    batches = [documents[i : i + flags.batch] for i in range(0, len(documents), flags.batch)]
    most_rows = max(len(rows) for _, rows in documents) + 1
    longest = max(max([i + n for i, n in enumerate(rows)], default=0) for _, rows in documents) + most_rows
    sequence = max(sequential_steps(rows) for _, rows in documents)

    config = SIZES[flags.model]
    params = random_params(config)
    strategies: dict[str, Pipelined | Sequential] = {OURS[0]: Pipelined(1, max(longest, 50), max(most_rows, 20))}
    strategies[OURS[1]] = Sequential(max(sequence, 512))
    systems: dict[str, Callable[[Batch], None]] = {}
    for each in build_each(config, params, "float32", strategies=strategies, weights=weights):
        systems[each.name] = partial(ours, each, tokenizer, flags.max_source)
    with tempfile.TemporaryDirectory(prefix="pipejax-bench-") as scratch:
        directory = write(config, params, Path(scratch)) if peers else Path(scratch)
        for name in peers:
            if name.startswith("hf"):
                eager = HuggingFace(name, directory, threads=flags.threads, device=torch_device())
                systems[name] = partial(hugging_face, eager, tokenizer, flags.max_source)
            else:
                translator = CTranslate2(name, directory, threads=flags.threads)
                systems[name] = partial(ctranslate2, translator, tokenizer, flags.max_source)
    del params

    seconds = dict.fromkeys(systems, 0.0)
    shapes: set[int] = set()
    progress = Progress("decoding", len(documents), unit="document")
    for number, part in enumerate(batches):
        full = [*part, *[part[-1]] * (flags.batch - len(part))]
        batch = [text for text, _ in full], [rows for _, rows in full]
        shape = bucket(max(len(tokenizer.encode(text)) + 1 for text in batch[0]))
        order = list(systems)[number % len(systems) :] + list(systems)[: number % len(systems)]
        if shape not in shapes:  # warm-up, for Hugging Face too
            shapes.add(shape)
            for system in systems.values():
                system(batch)
        for name in order:
            settle()
            begun = time.perf_counter()
            systems[name](batch)
            seconds[name] += time.perf_counter() - begun
        progress.add(len(part))
    progress.close()

    count, (first, own) = len(documents), next(iter(seconds.items()))  # the first system is our pipelined decoder
    print(f"{count} documents, batch {flags.batch}, {flags.model}, {flags.threads} threads; compilation left out")
    print(f"{'system':<22}{'seconds':>9}{'documents/s':>13}{f'{first} is faster by':>40}")
    for name, value in seconds.items():
        print(f"{name:<22}{value:>9.1f}{count / value:>13.2f}{value / own:>39.2f}x")
    if flags.json:
        results = [{"system": name, "seconds": value, "documents": count} for name, value in seconds.items()]
        command = "python -m lab.benchmarks.documents " + " ".join(argv)
        save(flags.json, {"results": results, "machine": machine(flags.threads), "command": command})
    return 0


def answers(file: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the source and the targets of each document."""
    with open(file, "rb") as lines:
        for place, value in read_objects(lines, file):
            targets = value.get("targets")
            if not isinstance(targets, list):
                raise UserError(place, found="no list of targets", expected="a list")
            yield text_of(value, "source", place), targets


def tokens_of(tokenizer: Tokenizer, most: int, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns sources i32 [B, L], padded to the size of a bucket, and their lengths i32 [B]."""
    ids = [tokenizer.affixes.around(tokenizer.encode(text), most) for text in texts]
    lengths = np.asarray([len(x) for x in ids], np.int32)
    return pad([np.asarray(x, np.int32) for x in ids], bucket(int(lengths.max()))), lengths


def ours(system: Pipejax, tokenizer: Tokenizer, most: int, batch: Batch) -> None:
    """Decodes a batch of texts into texts with pipejax."""
    memory = system.decoder.encode(*tokens_of(tokenizer, most, batch[0]))
    decoded = system.decoder.decode(memory, batch[1])
    for rows, lengths in zip(decoded.tokens, decoded.lengths, strict=True):
        for row, n in zip(rows, lengths, strict=True):
            tokenizer.decode(row[:n].tolist())


def hugging_face(system: HuggingFace, tokenizer: Tokenizer, most: int, batch: Batch) -> None:
    """Decodes a batch of texts into texts with transformers, which pads sources to the longest one only."""
    source, lengths = tokens_of(tokenizer, most, batch[0])
    source = source[:, : lengths.max()]
    torch: Any = system.torch
    ids, real = (
        torch.tensor(x, device=system.device).long() for x in (source, np.arange(source.shape[1]) < lengths[:, None])
    )
    steps = [sequential_steps(rows) for rows in batch[1]]
    with torch.inference_mode():
        found = system.generate(steps, input_ids=ids, attention_mask=real)
    check_lengths(found, steps)
    for row in found:
        tokenizer.decode(row[:-1])


def ctranslate2(system: CTranslate2, tokenizer: Tokenizer, most: int, batch: Batch) -> None:
    """Decodes a text into a text with CTranslate2, whose input and output are words instead of ids."""
    source, lengths = tokens_of(tokenizer, most, batch[0])
    words = words_of(source[0, : lengths[0]].tolist())
    steps = sequential_steps(batch[1][0])
    found = system.generate([words], steps)
    check_lengths(found, [steps])
    tokenizer.decode([i for i in ids_of(found[0]) if i > 2])


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
