"""Times the first answer of a new process, for pipejax and other systems, with models that are ready on the disk.

    python -m lab.benchmarks.first_use --model base --json OUT

Each process answers one source of made-up words with --tokens tokens, by one T5 with random weights. The systems take
turns, and each turn starts a new process. "whole" is the time of the whole process, "loading" ends when the model is
loaded, imports included, and "answer" is the rest. "cold" means an empty cache: pipejax then compiles its programs and
its kernel. The programs of the other systems follow the short examples in their documentation.
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.benchmarks.peers.process import ROOT, peer, python_of
from lab.benchmarks.peers.vocabulary import words_of
from lab.benchmarks.peers.worker import error_line
from lab.benchmarks.systems import SIZES, machine, models, random_params, save, use_threads, write
from pipejax.system import cli, compile_cache
from pipejax.system.progress import Progress

# The arguments of each program: the directory of its model, a file with the source, and the tokens of the answer.
BEGIN = "import json, sys, time; begun = time.perf_counter(); where, file, tokens = *sys.argv[1:3], int(sys.argv[3])"
END = "print(json.dumps({'load_s': loaded - begun, 'answer_s': time.perf_counter() - loaded, 'tokens': len(found)}))"
GENERATE = """
inputs = tokenizer(open(file).read(), return_tensors="pt", return_token_type_ids=False)
loaded = time.perf_counter()
found = model.generate(**inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)[0][1:]
tokenizer.decode(found)
"""
PROGRAMS = {
    "pipejax": """
import pipejax
generator = pipejax.load(where, overrides=["decode.weights=HELD", f"decode.max_length={tokens}"])
loaded = time.perf_counter()
found = [i for row in generator.decode([open(file).read()])[0]["row_ids"] for i in row]
""",
    "hf": """
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained(where), AutoModelForSeq2SeqLM.from_pretrained(where)
"""
    + GENERATE,
    "ct2": """
import ctranslate2, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(where + "/../hf/tokenizer.json")
translator = ctranslate2.Translator(where, compute_type="HELD", inter_threads=1)
loaded = time.perf_counter()
words = tokenizer.encode(open(file).read()).tokens
options = {"beam_size": 1, "min_decoding_length": tokens, "max_decoding_length": tokens}
found = translator.translate_batch([words], **options)[0].hypotheses[0]
tokenizer.decode([tokenizer.token_to_id(word) for word in found])
""",
    "openvino": """
sys.modules["torchvision"] = None  # see peers/openvino.py
from optimum.intel import OVModelForSeq2SeqLM
from transformers import AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained(where), OVModelForSeq2SeqLM.from_pretrained(where)
"""
    + GENERATE,
}


@dataclasses.dataclass(frozen=True)
class Start:
    """A system, and the command that starts its process; `cold`: the cache is emptied before each process."""

    name: str
    command: Sequence[str]
    cold: bool = False

    def run(self, scratch: Path) -> dict[str, float]:
        """Runs one process; returns its seconds.

        Raises:
          RuntimeError: the process failed.
        """
        cache = scratch / ("cold" if self.cold else "cache")
        if self.cold:
            shutil.rmtree(cache, ignore_errors=True)
        environment = os.environ | {compile_cache.VARIABLE: str(cache), "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # it would make each process parse our modules again
        begun = time.perf_counter()
        done = subprocess.run(self.command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        whole = time.perf_counter() - begun
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        last = (done.stdout.splitlines() or [""])[-1]
        return {"whole_s": whole} | (json.loads(last) if last.startswith("{") else {})


def program(name: str, *arguments: object, peer: str = "", held: str = "float32") -> list[str]:
    """The command that runs one of `PROGRAMS` with the interpreter of its peer, or with ours."""
    text = "\n".join([BEGIN, PROGRAMS[name].replace("HELD", held).strip(), END])
    return [python_of(peer) if peer else sys.executable, "-c", text, *map(str, arguments)]


def main(argv: Sequence[str]) -> int:
    """Measures the systems, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.first_use", description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="base")
    parser.add_argument("--weights", choices=("float32", "int8"), default="float32", help="for systems that have both")
    parser.add_argument(
        "--source", type=cli.whole_number(1), default=512, metavar="L", help="words of the source (512)"
    )
    parser.add_argument("--tokens", type=cli.whole_number(2), default=16, metavar="N", help="tokens of the answer (16)")
    parser.add_argument("--rounds", type=cli.whole_number(1), default=7, metavar="N")
    parser.add_argument(
        "--threads", type=cli.whole_number(1), default=2, metavar="N", help="threads of each system (2)"
    )
    parser.add_argument("--no-peers", action="store_true", help="only pipejax")
    parser.add_argument("--keep", metavar="DIR", help="directory in which models are kept and reused")
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    use_threads(flags.threads)
    config, held = SIZES[flags.model], flags.weights
    failures: list[dict[str, str]] = []
    with (
        models(flags.keep, flags.model) as directory,
        tempfile.TemporaryDirectory(prefix="pipejax-bench-") as name,
    ):
        scratch = Path(name)
        (scratch / "cache").mkdir(mode=0o700)
        model, run = write(config, random_params(config), directory), scratch / "run"
        source = " ".join(words_of(np.random.default_rng(1).integers(3, config.vocab_size, flags.source).tolist()))
        (scratch / "source.txt").write_text(source)
        (scratch / "source.jsonl").write_text(json.dumps({"source": source}) + "\n")
        made = scratch / "float32" if held == "int8" else run  # the model on the disk has the weights of --weights
        convert(["from-hf", str(model), str(made)])
        if held == "int8":
            convert(["quantize", str(made), str(run)])
        decode = [sys.executable, "-m", "pipejax", "decode", "--checkpoint", str(run), "--output", "-"]
        decode += ["--input", str(scratch / "source.jsonl"), f"--set=decode.weights={held}"]
        decode += [f"--set=decode.max_length={flags.tokens}"]
        asked = scratch / "source.txt", flags.tokens
        starts = [
            Start("pipejax decode", decode),
            Start("pipejax decode, cold", decode, cold=True),
            Start("pipejax.load", program("pipejax", run, *asked, held=held)),
        ]
        for kind, at, name in [] if flags.no_peers else of_peers(held):
            try:
                with peer(name, model, threads=flags.threads):  # converts the models that are missing
                    pass
                starts.append(Start(name, program(kind, directory / at, *asked, peer=name, held=held)))
            except Exception as error:  # any error: the other systems are measured nevertheless
                failures.append(failure(name, error))
        found = measure(starts, scratch, flags.rounds, failures)
    results = [{"system": name} | medians(runs) for name, runs in found.items()]
    print("\n".join(table(results)))
    if flags.json:
        about = {"machine": machine(flags.threads), "model": flags.model, "weights": held, "tokens": flags.tokens}
        command = "python -m lab.benchmarks.first_use " + " ".join(argv)
        save(flags.json, {"results": results, "failures": failures, "command": command, "source": flags.source} | about)
    return int(bool(failures))


def convert(arguments: Sequence[str]) -> None:
    """Runs `pipejax convert` with these arguments."""
    command = [sys.executable, "-m", "pipejax", "convert", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def of_peers(held: str) -> list[tuple[str, str, str]]:
    """The program of each peer, the directory of its model, and its name in `peers`."""
    kind = {"float32": "fp32", "int8": "int8"}[held]
    return [
        ("hf", "hf", "hf"),
        ("ct2", f"ct2-{held}", f"ct2-{kind}"),
        ("openvino", f"openvino-{kind}", f"openvino-{kind}"),
    ]


def failure(name: str, error: Exception) -> dict[str, str]:
    """Prints a warning about a system that was not measured, and returns the record of it."""
    cli.note(f"warning: {name} is left out: {error_line(error)}")
    return {"system": name, "error": error_line(error)}


def measure(
    starts: Sequence[Start], scratch: Path, rounds: int, failures: list[dict[str, str]]
) -> dict[str, list[dict[str, float]]]:
    """Runs all systems in turn, in another order in each round. A first round fills caches and does not count."""
    found: dict[str, list[dict[str, float]]] = {start.name: [] for start in starts}
    progress = Progress("measuring", (rounds + 1) * len(starts), unit="start")
    for number in range(rounds + 1):
        shift = number % len(starts)
        for start in (*starts[shift:], *starts[:shift]):
            if start.name in found and (number or not start.cold):
                try:
                    seconds = start.run(scratch)
                except Exception as error:  # any error, as in `main`
                    failures.append(failure(start.name, error))
                    del found[start.name]
                else:
                    found[start.name] += [seconds] * bool(number)
            progress.add(1)
    progress.close()
    return found


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure that all runs have."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]} | {"rounds": len(runs)}


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """The table as lines of text, the fastest system first."""
    lines = [f"{'first answer of a fresh process':<34}{'whole s':>9}{'loading s':>11}{'answer s':>10}{'tokens':>8}"]
    for r in sorted(results, key=lambda r: r["whole_s"]):
        more = "".join(
            f"{r[key]:>{width}.2f}" if key in r else " " * width for key, width in (("load_s", 11), ("answer_s", 10))
        )
        lines.append(f"{r['system']:<34}{r['whole_s']:>9.2f}{more}{r.get('tokens', ''):>8}")
    return lines


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
