"""The output directory of `pipejax bulk`: a manifest, and in shards/ a file of records for each block of lines.

skipped/ has a file of the same name with the errors of skipped lines, if there are any.

A shard gets its name only when it is complete and on the disk, and the name identifies its lines. The existing shards
are therefore the only record of progress, and the record stays consistent if a process is killed at any time.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self, TypedDict

from pipejax.apps.bulk.blocks import Block
from pipejax.offline.resume import first_difference, flattened
from pipejax.system import strict_json
from pipejax.system.errors import UserError
from pipejax.system.files import lock, make_directories, sweep, write_text
from pipejax.system.strict_json import JsonObject

FORMAT = 1
MANIFEST = "manifest.json"
ATTEMPTS = 10  # processes that may die while decoding one block


# Keys: "shard", the path; "records"; "bytes"; "sha256"; and "skipped", the errors of skipped lines, if there are any.
Shard = JsonObject


class Input(TypedDict):
    """The facts about an input file in the manifest."""

    path: str
    lines: int
    bytes: int
    sha256: str


class Plan(TypedDict):
    """The facts that shards depend on, as in the manifest."""

    settings: Mapping[str, object]
    block: int  # lines per shard
    inputs: list[Input]


def name_shards(files: Sequence[Sequence[Block]]) -> dict[str, Block]:
    """Returns the blocks of all input files by the names of their shards.

    A name has the file's number and name, the lines, and a digest; names sort in the order of the lines.
    """
    found = {}
    for number, blocks in enumerate(files):
        for block in blocks:
            stem = re.sub(r"[^A-Za-z0-9_-]", "_", Path(block.path).name)[:80]
            lines = f"{block.first:010}-{block.first + block.lines - 1:010}"
            found[f"{number:06}-{stem}-{lines}-{block.digest}.jsonl"] = block
    return found


class Shards:
    """The shards in an output directory, as one run of the command writes them."""

    def __init__(self, output: Path, run: str) -> None:
        """Describes the directories; nothing is created.

        `run` is unique to each run of the command.
        """
        self.directory, self.skipped = output / "shards", output / "skipped"
        # The name includes the run's name, so that the request to stop a killed run does not stop a later run.
        self._stop = self.directory / f".stop-{run}"

    def stop(self) -> None:
        """Asks all workers of this run to stop before their next block."""
        self._stop.touch()

    @property
    def stopped(self) -> bool:
        """Whether the workers of this run should stop."""
        return self._stop.exists()

    def begin(self, name: str) -> None:
        """Counts the attempts at a shard.

        An attempt ends with the shard, or with the death of the process.

        Raises:
          UserError: ATTEMPTS processes have died over this shard.
        """
        with (self.directory / f".{name}.attempts").open("ab", buffering=0) as file:
            file.write(b".")
            if file.tell() > ATTEMPTS:
                raise UserError(
                    name,
                    found=f"{ATTEMPTS} processes that died while decoding these lines",
                    expected="records",
                    hint="if memory is short, try a smaller decode.batch_size or --block",
                )

    def write(self, name: str, text: str, skipped: Sequence[str] = ()) -> Shard:
        """Writes a shard completely and synced, or not at all; the errors of skipped lines are written first."""
        if skipped:
            make_directories(self.skipped)
            write_text(self.skipped / name, "".join(json.dumps(error, ensure_ascii=False) + "\n" for error in skipped))
        write_text(self.directory / name, text)
        (self.directory / f".{name}.attempts").unlink(missing_ok=True)
        return _describe_shard(name, text.encode(), skipped)

    def look(self, name: str) -> Shard | None:
        """Returns the facts about an existing shard, or None; reads its whole content."""
        path, beside = self.directory / name, self.skipped / name
        if not path.exists():
            return None
        skipped = beside.read_text(encoding="utf-8").split("\n") if beside.exists() else []
        return _describe_shard(name, path.read_bytes(), [strict_json.loads(error) for error in skipped if error])


def _describe_shard(name: str, content: bytes, skipped: Sequence[str]) -> Shard:
    digest = hashlib.sha256(content).hexdigest()
    said = {"shard": f"shards/{name}", "records": content.count(b"\n"), "bytes": len(content), "sha256": digest}
    return said | ({"skipped": list(skipped)} if skipped else {})


class Output:
    """The output directory of a run of the command, locked while it runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, uuid.uuid4().hex
        self.shards = Shards(path, self.run)
        self.manifest = path / MANIFEST
        if path.exists() and not path.is_dir():
            raise UserError(f"--output {path}", found="a file", expected="a directory")
        strange = path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir())
        if strange and not self.manifest.is_file():
            raise UserError(
                f"--output {path}",
                found="a directory with other files",
                expected="a new or empty directory, or the output directory of an unfinished pipejax bulk run",
            )

    def __enter__(self) -> Self:
        """Creates and locks the directory, and removes files of killed processes. The lock ends with the process.

        Raises:
          UserError: another process uses the directory.
        """
        make_directories(self.path)
        self._lock = (self.path / ".lock").open("a")
        if not lock(self._lock.fileno()):
            self._lock.close()
            raise UserError(
                f"--output {self.path}", "in use by another pipejax bulk process", expected="another directory"
            )
        sweep(self.shards.directory, ".*")
        sweep(self.shards.skipped, ".*")
        sweep(self.path, f".{MANIFEST}-*")
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def take_up(self, work: Plan) -> list[Shard]:
        """Begins the work, or continues it; returns the shards that the manifest of an earlier run lists.

        Raises:
          UserError: the manifest is invalid, or describes work with other settings or inputs.
        """
        if not self.manifest.exists():
            self.note(work, [], complete=False)
            # shards/ is created after the manifest, without which the directory would not be recognised.
            make_directories(self.shards.directory)
            return []
        try:
            found = strict_json.loads(self.manifest.read_text(encoding="utf-8"))
            assert found["format"] == FORMAT
            then = _fixed_values(found)
            shards = list[Shard](found["shards"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(
                self.manifest, found=f"no manifest of format {FORMAT}", expected="the manifest of a pipejax bulk run"
            ) from error
        if other := first_difference(_fixed_values(work), then):
            raise UserError(
                f"--output {self.path}: holds other work", found=f"{other} (choose another --output for a new run)"
            )
        make_directories(self.shards.directory)
        return shards

    def note(self, work: Plan, shards: Sequence[Shard], *, complete: bool) -> None:
        """Writes the manifest with these shards."""
        skipped = sum(len(shard.get("skipped", ())) for shard in shards)
        content = {"format": FORMAT, "complete": complete, **work, "skipped": skipped, "shards": list(shards)}
        write_text(self.manifest, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def written(self, wanted: Collection[str], known: Sequence[Shard]) -> dict[str, Shard]:
        """Reads the wanted shards that exist, and returns them.

        Raises:
          UserError: a shard differs from its description in `known`, or belongs to lines that the inputs do not have.
        """
        noted = {shard["shard"]: shard for shard in known}
        found = dict[str, Shard]()
        for path in sorted(self.shards.directory.glob("[!.]*")):
            if path.name not in wanted:
                raise UserError(
                    path,
                    found="a shard of lines that the input no longer has at this place",
                    expected="the unchanged input",
                    hint="only lines without a shard may change",
                )
            shard = self.shards.look(path.name)
            if shard and noted.get(shard["shard"], shard) != shard:
                raise UserError(
                    path,
                    found=f"content that differs from {MANIFEST}",
                    expected="an unchanged shard",
                    hint="a deleted shard is decoded again",
                )
            if shard:
                found[path.name] = shard
        return found


def _fixed_values(work: Plan) -> dict[str, object]:
    """Returns the values that must not change between runs, by name.

    Paths of inputs may change, and the lines are compared by the names of the shards.
    """
    flat = {"--block": work["block"], "the number of inputs": len(work["inputs"]), **flattened(work["settings"])}
    return flat | {f"input {i}": Path(given["path"]).name for i, given in enumerate(work["inputs"], start=1)}
