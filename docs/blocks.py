"""Runs the shell blocks of README.md and of the pages in docs/, so that no page shows a command that fails.

    python docs/blocks.py              # all pages; minutes
    python docs/blocks.py decoding     # one

A fence says what becomes of its block: "```shell run" is run, "```shell network" and its like (`REASONS`) are not. A
comment `<!-- run ... -->` is run too and not shown: it makes what a page takes as given. Each page gets a copy of the
project of its own, with small data and a tiny random T5 under the names that the pages use; trainings are short.
"""

import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REASONS = {
    "network": "fetches from the network or installs",
    "gpu": "needs a GPU",
    "tokenizer": "needs a tokenizer that can write digits and any word, which the tiny T5 here has not",
    "cluster": "needs a cluster or its launcher",
    "large": "needs a large model, or data that are not at hand",
    "long": "takes long",
}
COPIED = ("pipejax", "configs", "lab", "tests", "train.py", "decode.py", "Makefile")
FENCE = re.compile(r"^```(shell[^\n]*)\n(.*?)^```$|^<!-- run\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
# What every training of these blocks is given last: a few updates of short lines.
SHORT = (
    *("train.steps=2", "train.warmup_steps=1", "train.batch_size=4", "train.accumulate=1", "train.length_group=1"),
    *("train.log_every=1", "train.evaluate_every=2", "train.evaluate_examples=2", "train.checkpoint_every=2"),
    *("train.shapes=1", "data.max_source=64", "data.max_target=64"),
)


class Block(NamedTuple):
    """A shell block of a page."""

    place: str  # PAGE:LINE
    says: str  # what follows "shell" in the fence: "run" or a reason
    code: str
    shown: bool


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and the pages of the site."""
    found = (path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts)
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


def blocks(page: Path) -> Iterator[Block]:
    """The shell blocks of a page, in order; hidden ones count as "run"."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        info, shown, hidden = found.groups()
        says = "run" if hidden else info.removeprefix("shell").strip()
        yield Block(f"{page.relative_to(ROOT)}:{line}", says, hidden or shown, not hidden)


def environment(folder: Path) -> dict[str, str]:
    """Variables for a folder outside the project: `pipejax` is a command, and the modules of docs/ can be imported."""
    programs = folder / ".programs"
    programs.mkdir()
    command = programs / "pipejax"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pipejax "$@"\n')
    command.chmod(0o755)
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "TQDM_DISABLE": "1",
    }


def prepare(folder: Path, given: Path) -> dict[str, str]:
    """Fills a folder with a copy of the project and of what the pages take as given; the environment to run in."""
    shutil.copytree(given, folder, dirs_exist_ok=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    variables = environment(folder) | {"PYTHONPATH": str(folder)}
    settings = " ".join(f"--set {setting}" for setting in SHORT)
    (folder / ".programs" / "pipejax").write_text(
        "#!/bin/sh\n"
        f'if test "$1" = train && test "$2" != --help; then set -- "$@" {settings}; fi\n'
        f'exec "{sys.executable}" -m pipejax "$@"\n'
    )
    return variables


def give(folder: Path) -> None:
    """Data of the demo task and a tiny random T5, under the names that the pages use."""
    import jax

    from pipejax.apps.demo import build_tokenizer, examples
    from pipejax.config import T5Config
    from pipejax.convert import from_hf, write_hf

    for split, count in (("train", 64), ("dev", 8), ("test", 8)):
        found = examples(split)[:count]
        lines = [{"id": e.id, "source": e.source, "targets": list(e.targets)} for e in found]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["article", "highlights"])
            rows.writerows([e.source, "\n".join(e.targets)] for e in found)
    questions = [{"id": str(i + 1), "source": e.source} for i, e in enumerate(examples("test")[:4])]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    model = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=1, num_decoder_layers=1)
    with tempfile.TemporaryDirectory() as tokenizer:
        build_tokenizer(Path(tokenizer))
        (folder / "models").mkdir()
        write_hf(model, model.init_params(jax.random.key(0)), folder / "models" / "my-t5", tokenizer)
    with contextlib.redirect_stdout(sys.stderr):
        for name in ("flan-t5-base", "flan-t5-small", "t5-base"):
            from_hf(folder / "models" / "my-t5", folder / "checkpoints" / name)


def run(page: Path, given: Path) -> int:
    """Runs the blocks of a page, each in the same folder; how many failed."""
    failed = 0
    wanted = [block for block in blocks(page) if block.says == "run"]
    if not wanted:
        return 0
    with tempfile.TemporaryDirectory() as name:
        variables = prepare(Path(name), given)
        for block in wanted:
            begun = time.monotonic()
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.code],
                cwd=name,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            failed += done.returncode != 0
            print(f"{block.place}: {'ok' if done.returncode == 0 else 'FAILED'}, {time.monotonic() - begun:.0f} s")
            if done.returncode:
                print(block.code, done.stdout, sep="\n")
            sys.stdout.flush()
    return failed


def main(names: list[str]) -> int:
    """Runs the pages of these names, or all of them; 1 if a block failed, 2 if there is no such page."""
    chosen = [page for page in pages() if not names or page.stem in names]
    if unknown := {*names} - {page.stem for page in chosen}:
        known = ", ".join(sorted(page.stem for page in pages()))
        print(f"pages: found no {', '.join(sorted(unknown))}; expected some of {known}", file=sys.stderr)
        return 2
    unmarked = [b for page in chosen for b in blocks(page) if b.says != "run" and b.says not in REASONS]
    for block in unmarked:
        print(f"{block.place}: found {block.says!r} after shell; expected run, {', '.join(REASONS)}")
    with tempfile.TemporaryDirectory() as given:
        give(Path(given))
        failed = sum(run(page, Path(given)) for page in chosen)
    return 1 if failed or unmarked else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
