"""Damages checkpoints, and compares restored arrays with saved arrays bit by bit, for pipejax and for plain Orbax."""

import json
import logging
import logging.handlers
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from lab.faults import runs
from lab.faults.runs import Commands
from pipejax import config as config_lib
from pipejax.checkpoint import Store
from pipejax.training.step import Trainer

Damage = Callable[[random.Random, Path], str]  # damages a directory of steps; returns a description


def _files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)


def _steps(directory: Path) -> list[Path]:
    return sorted((p for p in directory.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))


def _newest(directory: Path) -> Path:
    return _steps(directory)[-1]


def _array_file(chance: random.Random, directory: Path) -> Path:
    return chance.choice([path for path in _files(_newest(directory)) if path.parent.name == "d"])


def flip(chance: random.Random, directory: Path) -> str:
    """Flips one bit in any file of the newest step."""
    return _flipped(chance, chance.choice(_files(_newest(directory))))


def flip_data(chance: random.Random, directory: Path) -> str:
    """Flips one bit in a file of arrays."""
    return _flipped(chance, _array_file(chance, directory))


def _flipped(chance: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return str(path)


def zero(chance: random.Random, directory: Path) -> str:
    """Writes a range of zeros, as after the loss of a disk block."""
    path = _array_file(chance, directory)
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content))
    end = min(start + chance.choice((16, 512, 4096)), len(content))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)
    return str(path)


def truncate(chance: random.Random, directory: Path) -> str:
    """Truncates any file."""
    path = chance.choice(_files(_newest(directory)))
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])
    return str(path)


def delete(chance: random.Random, directory: Path) -> str:
    """Deletes any file."""
    path = chance.choice(_files(_newest(directory)))
    path.unlink()
    return str(path)


def append(chance: random.Random, directory: Path) -> str:
    """Appends bytes to any file."""
    path = chance.choice(_files(_newest(directory)))
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 100)))
    return str(path)


def swap_items(chance: random.Random, directory: Path) -> str:
    """Swaps an item of the newest step with the same item of the previous step."""
    before, newest = _steps(directory)[-2:]
    name = chance.choice(("params", "state", "manifest"))
    _swap(before / name, newest / name)
    return f"{newest / name} <-> {before / name}"


def swap_files(chance: random.Random, directory: Path) -> str:
    """Swaps two files of arrays."""
    paths = [path for path in _files(_newest(directory)) if path.parent.name == "d"]
    first, second = chance.sample(paths, 2)
    _swap(first, second)
    return f"{first} <-> {second}"


def swap_steps(chance: random.Random, directory: Path) -> str:
    """Swaps the names of two steps."""
    before, newest = _steps(directory)[-2:]
    _swap(before, newest)
    return f"{newest} <-> {before}"


def empty_directory(chance: random.Random, directory: Path) -> str:
    """Adds an empty directory with the name of a later step."""
    path = directory / str(int(_newest(directory).name) + chance.randrange(1, 100))
    path.mkdir()
    return str(path)


def foreign_directory(chance: random.Random, directory: Path) -> str:
    """Adds a later step that pipejax did not write: other files, another Orbax checkpoint, or a file."""
    path = directory / str(int(_newest(directory).name) + chance.randrange(1, 100))
    kind = chance.choice(("files", "orbax", "file"))
    if kind == "files":
        path.mkdir()
        (path / "thesis.tex").write_text("precious")
    elif kind == "file":
        path.write_text("precious")
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "params", {"a": np.arange(3.0)})
    return f"{path} ({kind})"


KINDS: tuple[Damage, ...] = (
    flip,
    flip_data,
    flip_data,
    zero,
    zero,
    truncate,
    delete,
    append,
    swap_items,
    swap_files,
    swap_steps,
    empty_directory,
    foreign_directory,
)


def _swap(a: Path, b: Path) -> None:
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def many(commands: Commands, scratch: Path, *, trials: int) -> dict[str, Any]:
    """Damages copies of a run's three steps, one step or, in every tenth trial, all steps, and restores."""
    path = runs.prepare(scratch / "tiny")
    assert commands.train(path, scratch / "run").end() == 0
    parts = commands.share("lab.faults.damage", scratch, trials)
    counts, plain = (sum((Counter(part[key]) for part in parts), Counter[str]()) for key in ("counts", "plain"))
    by_kind: dict[str, Counter[str]] = {}
    for kind, found in (pair for part in parts for pair in part["by_kind"].items()):
        by_kind.setdefault(kind, Counter()).update(found)
    failures = [failure for part in parts for failure in part["failures"]]
    again = sum(part["again"] for part in parts)
    return {
        "trials": trials,
        "wrong_states_accepted": counts["WRONG"],
        "restored_the_newest_undamaged": counts["newest"],
        "fell_back": counts["fell back"],
        "saved_again_after_falling_back": again,
        "none_left": counts["none left"],
        "plain_orbax_wrong_states_accepted": plain["wrong"],
        "plain_orbax_right": plain["right"],
        "plain_orbax_raised": plain["raised"],
        "by_kind": {name: dict(counter) for name, counter in sorted(by_kind.items())},
        "ok": not failures and again == counts["fell back"] and counts.total() == trials,
        "failures": failures[:10],
    }


def main(argv: Sequence[str]) -> int:
    """Makes the trials from one number to another."""
    scratch, first, last, out = Path(argv[0]), int(argv[1]), int(argv[2]), Path(argv[3])
    config = config_lib.load(scratch / "tiny/config.py")
    trainer = Trainer(config)
    original, saved = scratch / "run/checkpoints", dict[int, Any]()
    for step in Store(original).steps():
        saved[step] = _bytes(Store(original).restore(step, lambda _: trainer.templates()).items)
    again = 0
    counts, plain = Counter[str](), Counter[str]()
    by_kind: dict[str, Counter[str]] = {}
    failures, heard = [], logging.handlers.BufferingHandler(1000)
    logging.getLogger("pipejax").addHandler(heard)
    for number in range(first, last):
        chance, copy = random.Random(number), scratch / f"copy-{first}/checkpoints"
        runs.copy(original, copy)
        damage = KINDS[number % len(KINDS)]
        done = damage(chance, copy)
        if number % 10 == 9:
            for place in _steps(copy):
                if (place / "params").is_dir():
                    shutil.rmtree(place / chance.choice(("params", "state", "manifest")))
            done += ", and something of every step"
        newest = _orbax(copy, trainer, saved)
        plain[newest] += 1
        before = {path.name for path in _steps(copy)}
        heard.buffer.clear()
        store = Store(copy, writable=True)
        restored = store.newest(lambda _: trainer.templates(), set_aside=True)
        aside = [p.name for p in copy.iterdir() if p.name.startswith("corrupt-")]
        if restored is None:
            result = "none left"
        elif _bytes(restored.items) != saved.get(restored.step):
            result = "WRONG"
            failures.append(f"{number}: {done}")
        else:
            result = "newest" if not aside else "fell back"
        # There is one line about each unused step, and the step is kept under another name.
        left = {path.name for path in _steps(copy)}
        if len(heard.buffer) != len(aside) or before - left != {name.split("-")[1] for name in aside}:
            failures.append(f"{number}: {done}: {[record.getMessage() for record in heard.buffer]}, {aside}")
        if result == "fell back" and restored is not None:  # the run continues, and saves the lost step again
            lost = int(max(aside, key=lambda name: int(name.split("-")[1])).split("-")[1])
            done_again = store.save(lost, restored.items, config=config, wait=True)
            again += done_again and _bytes(store.restore(lost, lambda _: trainer.templates()).items) == _bytes(
                restored.items
            )
        store.close()
        counts[result] += 1
        by_kind.setdefault(damage.__name__, Counter())[result] += 1
    found = {"counts": counts, "plain": plain, "by_kind": by_kind, "again": again, "failures": failures}
    out.write_text(json.dumps(found))
    return 0


def _bytes(items: Any) -> dict[str, bytes]:
    """The bytes of each array by path, without the use of fingerprints."""
    leaves = jax.tree_util.tree_flatten_with_path(items)[0]
    return {jax.tree_util.keystr(keys): np.asarray(x).tobytes() for keys, x in leaves}


def _orbax(directory: Path, trainer: Trainer, saved: dict[int, Any]) -> str:
    """The result of plain Orbax: the latest step, restored as in its documentation."""
    handlers = {"params": ocp.StandardCheckpointHandler(), "state": ocp.StandardCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(read_only=True)
    try:
        with ocp.CheckpointManager(directory, options=options, item_handlers=handlers) as manager:
            step = manager.latest_step()
            wanted = {name: ocp.args.StandardRestore(template) for name, template in trainer.templates().items()}
            restored = manager.restore(step, args=ocp.args.Composite(**wanted))
            items = {name: restored[name] for name in wanted}
    except Exception:
        return "raised"
    return "right" if _bytes(items) == saved.get(step or 0) else "wrong"
