"""Kills the workers and the leader of `pipejax bulk` at random, and compares its speed with processes without Ray.

    python -m lab.experiments.bulk kills [--lines 20000] [--workers-killed 20] [--leaders-killed 5]
    python -m lab.experiments.bulk speed [--lines 40000] [--rounds 3]

A tiny random T5 decodes short lines by two workers on this machine's CPU. After the kills, every record must exist
once, with the same bytes as in `pipejax decode`, and no shard that was complete when a leader died may have been
written again. The speed is measured over the shards in the middle of a run, after all workers have compiled. Shards
have 1,000 lines in `speed`, as in `pipejax bulk`, and 100 lines in `kills`. The command needs Linux and pipejax[ray].
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pipejax.apps.bulk import workers as bulk
from pipejax.apps.bulk.blocks import Block
from pipejax.apps.bulk.shards import Output
from pipejax.system import cli
from support.descendants import descendants, workers

PATIENCE = 600.0  # seconds after which a lack of progress is an error


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = cli.Parser(prog="python -m lab.experiments.bulk", description=__doc__)
    parser.add_argument("part", choices=("kills", "speed"))
    parser.add_argument("--lines", type=cli.whole_number(100), metavar="N")
    parser.add_argument("--block", type=cli.whole_number(1), metavar="N", help="lines of a shard")
    parser.add_argument("--workers-killed", type=cli.whole_number(0), default=20, metavar="N")
    parser.add_argument("--leaders-killed", type=cli.whole_number(0), default=5, metavar="N")
    parser.add_argument("--rounds", type=cli.whole_number(1), default=3, metavar="N", help="rounds of `speed`")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    flags = parser.parse_args(argv)
    lines, block = (20000, 100) if flags.part == "kills" else (40000, 1000)
    flags.lines, flags.block = flags.lines or lines, flags.block or block
    # For all processes. Ray's workers would have a niceness of 15, and other work on the machine would slow them down.
    os.environ |= {"JAX_PLATFORMS": "cpu", "RAY_worker_niceness": "0"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, flags.lines, random.Random(flags.seed))
        found = kills(folder, flags) if flags.part == "kills" else speed(folder, flags)
    print(json.dumps(found, indent=1))
    return 0 if found.get("ok", True) else 1


def prepare(folder: Path, lines: int, rng: random.Random) -> None:
    """Writes a checkpoint, and lines of 1 to 20 words in four files."""
    import jax
    import numpy as np

    from pipejax import checkpoint
    from pipejax.apps import demo
    from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, T5Config, TrainConfig

    model = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=1, num_decoder_layers=1)
    config = Config(
        name="tiny",
        model=model,
        grid=GridConfig(delay=2, time_max=12, sub_max=4),
        data=DataConfig(task="demo"),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(max_length=16),
    )
    demo.build_tokenizer(folder / "tokenizer")
    noise = np.random.default_rng(0)  # with T5's usual random weights nearly all answers are equal
    params = jax.tree.map(lambda x: x + 0.5 * noise.normal(size=x.shape), model.init_params(jax.random.key(0)))
    checkpoint.save_params(folder / "checkpoint", config, params, tokenizer_source=folder / "tokenizer")
    notes = [example.source.split() for example in demo.examples("test")[:50]]
    for part in range(4):
        numbers = range(part * lines // 4, (part + 1) * lines // 4)
        sources = [" ".join(rng.choices(rng.choice(notes), k=rng.randint(1, 20))) for _ in numbers]
        written = (json.dumps({"id": f"r{n}", "source": text}) for n, text in zip(numbers, sources, strict=True))
        (folder / f"part{part}.jsonl").write_text("".join(line + "\n" for line in written))


# Kills.


def kills(folder: Path, flags: Any) -> dict[str, Any]:
    """Kills workers and leaders at random moments, evenly over the work; returns the state of the output."""
    rng, output = random.Random(flags.seed), folder / "out"
    shards = -(-flags.lines // flags.block)
    victims = ["worker"] * flags.workers_killed + ["leader"] * flags.leaders_killed
    rng.shuffle(victims)
    kept: dict[str, tuple[int, int]] = {}
    rewritten, orphans = 0, list[int]()
    leader = start(folder, output, flags)
    for number, victim in enumerate(victims):
        due = shards * (number + rng.random()) / len(victims) * 0.9
        running = wait(output, due, leader)
        if victim == "worker":
            os.kill(rng.choice(running), signal.SIGKILL)
            continue
        orphans += descendants(leader.pid)
        leader.kill()
        leader.wait()  # the next leader starts while workers of this one may still write
        rewritten += sum(written(output).get(name) != facts for name, facts in kept.items())
        kept = written(output)
        leader = start(folder, output, flags)
    code, begun = leader.wait(), time.monotonic()
    while any(map(alive, orphans)) and time.monotonic() < begun + PATIENCE:
        time.sleep(0.1)
    rewritten += sum(written(output).get(name) != facts for name, facts in kept.items())
    content = b"".join(path.read_bytes() for path in sorted(output.glob("shards/*.jsonl")))
    expected = b"".join(decoded(folder, part) for part in range(4))
    ids = [json.loads(line)["id"] for line in content.splitlines()]
    found = {
        "killed": {name: victims.count(name) for name in ("worker", "leader")},
        "records": len(ids),
        "each once": sorted(ids) == sorted(f"r{n}" for n in range(flags.lines)),
        "bytes of pipejax decode": content == expected,
        "different records": len({line.partition(b'"text"')[2] for line in content.splitlines()}),
        "shards": len(written(output)),
        "written again": rewritten,
        "complete": json.loads((output / "manifest.json").read_text())["complete"],
        "processes of killed leaders that live": sum(map(alive, orphans)),
        "exit code": code,
    }
    wanted = {"each once": True, "bytes of pipejax decode": True, "written again": 0, "complete": True, "exit code": 0}
    wanted["processes of killed leaders that live"] = 0
    return found | {"ok": found | wanted == found}


def start(folder: Path, output: Path, flags: Any) -> subprocess.Popen[bytes]:
    """Starts a leader."""
    command = [sys.executable, "-m", "pipejax", "bulk", "--checkpoint", str(folder / "checkpoint"), "--workers", "2"]
    command += ["--input", str(folder / "part*.jsonl"), "--output", str(output), "--block", str(flags.block)]
    return subprocess.Popen(command)


def decoded(folder: Path, part: int) -> bytes:
    """The bytes that `pipejax decode` writes for a file."""
    target = folder / f"expected{part}.jsonl"
    command = [sys.executable, "-m", "pipejax", "decode", "--checkpoint", str(folder / "checkpoint")]
    command += ["--input", str(folder / f"part{part}.jsonl"), "--output", str(target)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return target.read_bytes()


def written(output: Path) -> dict[str, tuple[int, int]]:
    """The inode and the time of the last change of each shard that is written."""
    found = {}
    for path in output.glob("shards/[!.]*"):
        facts = path.stat()
        found[path.name] = facts.st_ino, facts.st_mtime_ns
    return found


def wait(output: Path, due: float, leader: subprocess.Popen[bytes]) -> list[int]:
    """Waits until `due` shards are written, and a random time longer; returns the workers that are then alive."""
    begun = time.monotonic()
    while leader.poll() is None and time.monotonic() < begun + PATIENCE:
        if len(written(output)) >= due:
            time.sleep(random.random())
            if found := workers(leader.pid):
                return found
        time.sleep(0.05)
    raise RuntimeError(f"the leader ended too early ({leader.poll()}), or nothing happened")


def alive(process: int) -> bool:
    """Whether a process runs: it has not ended, and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Speed.


def speed(folder: Path, flags: Any) -> dict[str, Any]:
    """Measures the records per second of two actors and of two processes without Ray, which take turns."""
    from pipejax.apps.bulk import ray_pool

    rates: dict[str, list[float]] = {"two actors": [], "two processes": []}
    files = sorted(str(path) for path in folder.glob("part*.jsonl"))
    for number in range(flags.rounds + 1):  # the first round compiles
        for name, pool in (("two actors", ray_pool.start(workers=2)), ("two processes", Processes())):
            output = folder / f"{name} {number}"
            work = bulk.BulkWork(str(folder / "checkpoint"), str(output), os.getcwd())
            with pool as started:
                bulk.decode_files(work, files, Output(output), started, block=flags.block)
            shards = sorted((output / "shards").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
            first, last = len(shards) // 5, len(shards) * 19 // 20
            records = sum(path.read_bytes().count(b"\n") for path in shards[first + 1 : last + 1])
            if number:
                rates[name].append(records / (shards[last].stat().st_mtime - shards[first].stat().st_mtime))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {"records/s": rates, "medians": medians, "ratio": medians["two actors"] / medians["two processes"]}


class Processes:
    """A pool of two processes, without Ray."""

    def __enter__(self) -> "Processes":
        """Starts them."""
        self.executor = ProcessPoolExecutor(2, get_context("spawn"))
        return self

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        self.executor.shutdown()

    def ask(self, work: bulk.BulkWork) -> dict[str, Any]:
        """The result of `bulk.describe`."""
        return self.executor.submit(bulk.describe, work).result()

    def map(self, work: bulk.BulkWork, blocks: Sequence[tuple[str, Block]]) -> Iterator[dict[str, Any]]:
        """Yields the result of `bulk.Worker` for each block."""
        return self.executor.map(_one, [work] * len(blocks), *zip(*blocks, strict=True))


def _one(work: bulk.BulkWork, name: str, block: Block) -> dict[str, Any]:
    """Decodes a block with the worker of this process."""
    global _worker
    _worker = _worker or bulk.Worker(work)
    return _worker(name, block)


_worker: bulk.Worker | None = None


if __name__ == "__main__":
    cli.run(main)
