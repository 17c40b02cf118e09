"""The directory that `pipejax bulk` fills: a manifest, and below shards/ a file of records for each block of lines.

Below skipped/ a file of the same name has the errors of the lines that were left out, if there are any.

A shard gets its name only when it is whole and on the disk, and its name says which lines it is of. So what is written
is what is done: nothing else has to be kept in step with it, whatever is killed and when.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict

from pipejax.apps.bulk.blocks import Block
from pipejax.offline.resume import first_difference, flattened
from pipejax.system import strict_json
from pipejax.system.errors import UserError
from pipejax.system.files import lock, make_directories, sweep, write_text

FORMAT = 1
MANIFEST = "manifest.json"
ATTEMPTS = 10  # processes that may die over one block


# "shard": its path, "records", "bytes", "sha256"; and "skipped", the errors of lines that were left out, if any was.
Shard = dict[str, Any]


class Input(TypedDict):
    path: str
    lines: int
    bytes: int
    sha256: str


class Plan(TypedDict):
    """The work that shards depend on."""

    settings: Mapping[str, object]
    block: int  # lines of a shard
    inputs: list[Input]


def name_shards(files: Sequence[Sequence[Block]]) -> dict[str, Block]:
    """The blocks of each input file by the names of their shards: file, lines, a digest; they sort as the lines."""
    found = {}
    for number, blocks in enumerate(files):
        for block in blocks:
            stem = re.sub(r"[^A-Za-z0-9_-]", "_", Path(block.path).name)[:80]
            lines = f"{block.first:010}-{block.first + block.lines - 1:010}"
            found[f"{number:06}-{stem}-{lines}-{block.digest}.jsonl"] = block
    return found


class Shards:
    def __init__(self, output: Path, run: str) -> None:
        """`run`: a name that is new each time that the work is taken up."""
        self.directory, self.skipped = output / "shards", output / "skipped"
        self._stop = self.directory / f".stop-{run}"  # a killed leader's workers must not stop those of the next one

    def stop(self) -> None:
        self._stop.touch()

    @property
    def stopped(self) -> bool:
        return self._stop.exists()

    def begin(self, name: str) -> None:
        """Counts the attempts at a shard, each of which ends with a shard or with the process."""
        with (self.directory / f".{name}.attempts").open("ab", buffering=0) as file:
            file.write(b".")
            if file.tell() > ATTEMPTS:
                raise UserError(
                    f"{name}: found {ATTEMPTS} processes that died while they decoded these lines; expected records "
                    "(too little memory? a smaller decode.batch_size or --block may do)"
                )

    def write(self, name: str, text: str, skipped: Sequence[str] = ()) -> Shard:
        """Writes a shard, whole and synced or not at all, and first the errors of lines that it lacks."""
        if skipped:
            make_directories(self.skipped)
            write_text(self.skipped / name, "".join(json.dumps(error, ensure_ascii=False) + "\n" for error in skipped))
        write_text(self.directory / name, text)
        (self.directory / f".{name}.attempts").unlink(missing_ok=True)
        return _said(name, text.encode(), skipped)

    def look(self, name: str) -> Shard | None:
        path, beside = self.directory / name, self.skipped / name
        if not path.exists():
            return None
        skipped = beside.read_text(encoding="utf-8").splitlines() if beside.exists() else []
        return _said(name, path.read_bytes(), [strict_json.loads(error) for error in skipped])


def _said(name: str, content: bytes, skipped: Sequence[str]) -> Shard:
    digest = hashlib.sha256(content).hexdigest()
    said = {"shard": f"shards/{name}", "records": content.count(b"\n"), "bytes": len(content), "sha256": digest}
    return said | ({"skipped": list(skipped)} if skipped else {})


class Output:
    def __init__(self, path: Path) -> None:
        self.path, self.run = path, uuid.uuid4().hex
        self.shards = Shards(path, self.run)
        self.manifest = path / MANIFEST
        if path.exists() and not path.is_dir():
            raise UserError(f"--output {path}: found a file; expected a directory")
        strange = path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir())
        if strange and not self.manifest.is_file():
            raise UserError(
                f"--output {path}: found a directory with other things in it; expected a new or an empty one, or one "
                "that pipejax bulk has begun"
            )

    def __enter__(self) -> Self:
        """Makes the directory, locks it; removes what killed processes have left; the lock ends with the process."""
        make_directories(self.path)
        self._lock = (self.path / ".lock").open("a")
        if not lock(self._lock.fileno()):
            self._lock.close()
            raise UserError(
                f"--output {self.path}: another pipejax bulk is at work here; expected a directory of one's own"
            )
        sweep(self.shards.directory, ".*")
        sweep(self.shards.skipped, ".*")
        sweep(self.path, f".{MANIFEST}-*")
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def take_up(self, work: Plan) -> list[Shard]:
        """Begins the work, or goes on with it; gives the shards whose digests an earlier run has written down."""
        if not self.manifest.exists():
            self.note(work, [], complete=False)
            make_directories(self.shards.directory)  # not before: without a manifest it would be a stranger's
            return []
        try:
            found = strict_json.loads(self.manifest.read_text(encoding="utf-8"))
            assert found["format"] == FORMAT
            then = _flat(found)
            shards = list[Shard](found["shards"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(
                f"{self.manifest}: found no manifest of format {FORMAT}; expected what pipejax bulk wrote"
            ) from error
        if other := first_difference(_flat(work), then):
            raise UserError(f"--output {self.path}: holds other work: found {other} (another --output begins anew)")
        make_directories(self.shards.directory)
        return shards

    def note(self, work: Plan, shards: Sequence[Shard], *, complete: bool) -> None:
        skipped = sum(len(shard.get("skipped", ())) for shard in shards)
        content = {"format": FORMAT, "complete": complete, **work, "skipped": skipped, "shards": list(shards)}
        write_text(self.manifest, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def written(self, wanted: Collection[str], known: Sequence[Shard]) -> dict[str, Shard]:
        """The shards that are there, of those wanted; all are read."""
        noted = {shard["shard"]: shard for shard in known}
        found = dict[str, Shard]()
        for path in sorted(self.shards.directory.glob("[!.]*")):
            if path.name not in wanted:
                raise UserError(
                    f"{path}: found a shard of lines that the input does not have at this place; expected the input as "
                    "it was (lines without a shard may change)"
                )
            shard = self.shards.look(path.name)
            if shard and noted.get(shard["shard"], shard) != shard:
                raise UserError(
                    f"{path}: found another content than {MANIFEST} says; expected it unchanged (a shard that is "
                    "removed is decoded again)"
                )
            if shard:
                found[path.name] = shard
        return found


def _flat(work: Plan) -> dict[str, object]:
    """The values that must stay, by name: not where the files lie, nor their lines, of which the shards' names tell."""
    flat = {"--block": work["block"], "the number of inputs": len(work["inputs"]), **flattened(work["settings"])}
    return flat | {f"input {i}": Path(given["path"]).name for i, given in enumerate(work["inputs"], start=1)}
