"""Compares the speed of `pipejax serve` with other servers that do the same work, and with decoding without a server.

    python -m lab.benchmarks.serve --model base --weights float32,int8 --concurrency 1,8 --peers hf,ct2-int8 --json OUT

All systems decode with one T5 of random weights, and each answer is forced to the same rows, as in
`lab.benchmarks.decode`. Each server is a process on this machine (`lab.benchmarks.apps`). In its turn of --seconds
seconds, a server is called over --concurrency connections, and each connection sends its next request as soon as it has
an answer. "offline" is `Generator.decode` in batches of as many sources, at most 8.
"""

import contextlib
import dataclasses
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from lab.benchmarks import apps
from lab.benchmarks.decode import rows_of, whole_numbers
from lab.benchmarks.systems import SIZES, SUFFIXES, machine, names_of, random_params, save, use_threads, write
from pipejax import checkpoint
from pipejax.config import Config, DataConfig, GridConfig, T5Config, TrainConfig
from pipejax.grid import sequential_steps
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

SOURCES = 32  # different sources, which are sent in turn
PATIENCE = 600.0  # seconds until a server must have started, or must have answered


def main(argv: Sequence[str]) -> int:
    """Measures the systems, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.serve", description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="base")
    parser.add_argument(
        "--weights", default="float32", metavar="NAME,...", help="weights of pipejax: float32, int8 (float32)"
    )
    parser.add_argument("--concurrency", default="1,4,8,16", metavar="N,...", help="simultaneous connections")
    parser.add_argument(
        "--peers", default="", metavar="NAME,...", help=f"some of {', '.join(apps.PEERS)}; make venv-bench"
    )
    parser.add_argument("--answer", default="8x14", metavar="NxM", help="rows and tokens of each answer (8x14)")
    parser.add_argument(
        "--source", type=cli.whole_number(1, 4096), default=512, metavar="L", help="tokens of each source (512)"
    )
    parser.add_argument(
        "--sub-max", type=cli.whole_number(1), default=20, metavar="S", help="rows of pipejax's grid (20)"
    )
    parser.add_argument(
        "--time-max", type=cli.whole_number(1), default=64, metavar="T", help="time-steps of pipejax's grid (64)"
    )
    parser.add_argument("--rounds", type=cli.whole_number(1), default=3, metavar="N")
    parser.add_argument(
        "--seconds", type=cli.whole_number(1), default=10, metavar="S", help="least seconds of each turn (10)"
    )
    parser.add_argument(
        "--threads", type=cli.whole_number(1), default=2, metavar="N", help="threads of all processes together (2)"
    )
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    levels, rows = whole_numbers("--concurrency", flags.concurrency), rows_of(flags.answer)
    weights = names_of("--weights", flags.weights, SUFFIXES)
    peers = names_of("--peers", flags.peers, apps.PEERS)
    if len(rows) >= flags.sub_max or len(rows) + max(rows) > flags.time_max:
        bounds = f"{flags.sub_max} x {flags.time_max}"
        raise UserError(f"--answer {flags.answer}", found=f"more than a grid of {bounds} can hold")
    grid = GridConfig(delay=1, time_max=flags.time_max, sub_max=flags.sub_max)
    use_threads(flags.threads)
    config = SIZES[flags.model]
    sources = np.random.default_rng(1).integers(3, config.vocab_size, (SOURCES, flags.source)).tolist()
    with tempfile.TemporaryDirectory(prefix="pipejax-bench-") as name, contextlib.ExitStack() as stack:
        directory, model = prepare(config, grid, Path(name), flags.source)
        systems: list[System] = []

        def start(name: str, where: Path, *more: str) -> int:
            cli.note(f"starting {name} {' '.join(more)}")
            command = [
                "lab.benchmarks.apps",
                name,
                str(where),
                "--answer",
                flags.answer,
                "--threads",
                str(flags.threads),
            ]
            command += ["--sub-max", str(grid.sub_max), "--time-max", str(grid.time_max)]
            log = directory.parent / f"{len(systems)}-{name}.log"
            return stack.enter_context(server([*command, *more], log)).port

        for held in weights:
            settings = [f"decode.weights={held}", "decode.dtype=float32"]
            # Prompts repeat, and the other servers encode each prompt again.
            more = "--warm-up", "0", "--encoding-cache", "0"
            port = start("pipejax", directory, *more, *(f"--set={one}" for one in settings))
            systems += [
                Ours(f"pipejax{way}{SUFFIXES[held]}", port, sources, rows, bool(way)) for way in ("", "-stream")
            ]
            generator = load(directory, overrides=settings)
            apps.force(generator, rows, grid)
            systems.append(Offline(f"offline{SUFFIXES[held]}", generator, sources, rows))
        for name in peers:
            systems.append(Peer(name, start(name, model), sources, rows))
        found = measure(systems, levels, flags.rounds, flags.seconds)
    results = [summary(system, level, found[system.name, level]) for level in levels for system in systems]
    print("\n".join([*table(results), "", *verdicts(found, levels, [*SUFFIXES.values()], peers)]))
    if flags.json:
        about = {"machine": machine(flags.threads), "model": flags.model, "answer": flags.answer}
        command = "python -m lab.benchmarks.serve " + " ".join(argv)
        save(flags.json, {"results": results, "command": command, "source": flags.source} | about)
    return 0


def prepare(config: T5Config, grid: GridConfig, scratch: Path, longest: int) -> tuple[Path, Path]:
    """Writes a checkpoint without a tokenizer and a Hugging Face model, with the same random weights."""
    params = random_params(config)
    run = Config(
        model=config,
        grid=grid,
        data=DataConfig(max_source=longest),
        train=TrainConfig(method="pipelined"),
    )
    checkpoint.save_params(scratch / "run", run, params)
    return scratch / "run", write(config, params, scratch)


class Server(NamedTuple):
    """A process that listens on this machine."""

    process: subprocess.Popen[bytes]
    port: int


@contextlib.contextmanager
def server(command: Sequence[str], log: Path) -> Iterator[Server]:
    """A context with a server: a Python module with arguments, which prints a line with its address.

    Raises:
      UserError: the server did not start.
    """
    with log.open("w") as said:
        process = subprocess.Popen([sys.executable, "-m", *command], stderr=said, stdout=said)
    try:
        ends, found = time.monotonic() + PATIENCE, None
        while not (found := re.search(r"serving .* at http://127\.0\.0\.1:(\d+)$", log.read_text(), re.MULTILINE)):
            if process.poll() is not None or time.monotonic() > ends:
                last = (log.read_text().splitlines() or ["no output"])[-1]
                raise UserError(" ".join(command[:2]), f"the server did not start ({last})")
            time.sleep(0.05)
        yield Server(process, int(found[1]))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# Systems.


class Reply(NamedTuple):
    """The points in time of a request, in seconds."""

    begun: float
    token: float  # the first token has arrived
    row: float  # the first row has arrived
    end: float


class System(Protocol):
    """A system that the benchmark measures."""

    name: str

    def turn(self, level: int, seconds: float) -> list[Reply]:
        """Sends requests for `seconds` seconds, `level` at a time, and at least `level` in total; returns all replies.

        Raises:
          AssertionError: an answer does not have the requested rows.
        """


@dataclasses.dataclass
class Offline:
    """Decoding without a server: as many sources in a call as there would be connections, in batches of at most 8."""

    name: str
    generator: Generator
    sources: list[list[int]]
    rows: list[int]

    def turn(self, level: int, seconds: float) -> list[Reply]:
        """See `System`."""
        replies, ends = list[Reply](), time.perf_counter() + seconds
        while not replies or time.perf_counter() < ends:
            begun = time.perf_counter()
            found = self.generator.decode([self.sources[i % SOURCES] for i in range(level)], batch_size=apps.BATCH)
            end = time.perf_counter()
            assert all(list(map(len, record["row_ids"])) == self.rows for record in found), (
                "the answers do not have the requested rows"
            )
            replies += [Reply(begun, end, end, end)] * level
        return replies


@dataclasses.dataclass
class Client:
    """The client of a server: it opens the connections and reads the answers."""

    name: str
    port: int
    sources: list[list[int]]
    rows: list[int]

    def turn(self, level: int, seconds: float) -> list[Reply]:
        """See `System`."""
        ready = threading.Barrier(level)

        def ask(number: int) -> list[Reply]:
            replies = list[Reply]()
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
            with contextlib.closing(connection):
                connection.connect()
                bodies = [self.body(self.sources[(number + level * i) % SOURCES]) for i in range(4)]
                ready.wait()
                ends = time.perf_counter() + seconds
                while not replies or time.perf_counter() < ends:
                    replies.append(self.ask(connection, bodies[len(replies) % 4]))
            return replies

        with ThreadPoolExecutor(level) as pool:
            return [reply for replies in pool.map(ask, range(level)) for reply in replies]

    def ask(self, connection: http.client.HTTPConnection, body: bytes) -> Reply:
        """One request."""
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200, f"{self.name}: {reply.read(500)!r}"
        token, row, end = self.read(reply)
        return Reply(begun, token, row, end)

    def body(self, source: list[int]) -> bytes:
        """The body of a request."""
        return json.dumps({"prompt": source}).encode()

    def read(self, reply: http.client.HTTPResponse) -> tuple[float, float, float]:
        """Reads a reply; returns the times when the first token, the first row and the end arrived."""
        text = reply.read()
        end = time.perf_counter()
        self.check(json.loads(text))
        return end, end, end

    def check(self, found: Any) -> None:
        """Raises an AssertionError if the answer does not have the requested rows."""
        raise NotImplementedError


class Peer(Client):
    """The client of another system's server."""

    def check(self, found: Any) -> None:
        """See `Client`. Answers of CTranslate2 include the eos here, since it never ends an answer by itself."""
        length = len(found["tokens"])
        assert length == sequential_steps(self.rows), f"{self.name}: an answer of {length} tokens"


@dataclasses.dataclass
class Ours(Client):
    """The client of `pipejax serve`, for whole answers or for streams of tokens."""

    stream: bool

    def body(self, source: list[int]) -> bytes:
        """See `Client`."""
        return json.dumps({"prompt": source} | ({"stream": True, "rows": True} if self.stream else {})).encode()

    def read(self, reply: http.client.HTTPResponse) -> tuple[float, float, float]:
        """See `Client`."""
        if not self.stream:
            return super().read(reply)
        token, row, count, last = 0.0, 0.0, 0, b""
        while (line := reply.readline()) and b"[DONE]" not in line:
            now = time.perf_counter()
            token = token or now
            if b'"row":0,' in line:
                count += 1
                row = now if count == self.rows[0] else row
            last = line if line.startswith(b"data: ") else last
        reply.read()
        end = time.perf_counter()
        self.check(json.loads(last.removeprefix(b"data: ")))
        assert row, "the first row did not arrive"
        return token, row, end

    def check(self, found: Any) -> None:
        """See `Client`."""
        lengths = [len(row) for row in found["choices"][0]["record"]["row_ids"]]
        assert lengths == self.rows, f"{self.name}: rows of {lengths} tokens"


# Measuring.

Found = dict[tuple[str, int], list[list[Reply]]]  # the replies of each round, by system and level


def measure(systems: Sequence[System], levels: Sequence[int], rounds: int, seconds: float) -> Found:
    """Measures all systems in turn, in another order in each round. Before that each system answers once to compile."""
    found: Found = {(system.name, level): [] for system in systems for level in levels}
    for system in systems:
        cli.note(f"warming up {system.name}")
        for level in levels if isinstance(system, Offline) else [1, levels[-1]] if isinstance(system, Ours) else [1]:
            system.turn(level, 0)
    cli.note("measuring")
    progress = Progress("measuring", rounds * len(found), unit="turn")
    for number in range(rounds):
        for level in levels:
            shift = number % len(systems)
            for system in (*systems[shift:], *systems[:shift]):
                found[system.name, level].append(system.turn(level, seconds))
                progress.add(1, system.name)
    progress.close()
    return found


def rate(replies: Sequence[Reply]) -> float:
    """The requests per second of a turn."""
    return len(replies) / (max(r.end for r in replies) - min(r.begun for r in replies))


def summary(system: System, level: int, rounds: Sequence[Sequence[Reply]]) -> dict[str, Any]:
    """The record of a system at a level: the median rate of the rounds, and milliseconds over all their requests."""
    found: dict[str, Any] = {"system": system.name, "concurrency": level, "requests": sum(map(len, rounds))}
    found["requests_per_s"] = statistics.median(map(rate, rounds))
    for name in ("token", "row", "end"):
        times = [1e3 * (getattr(reply, name) - reply.begun) for replies in rounds for reply in replies]
        found[name] = {"p50_ms": float(np.percentile(times, 50)), "p99_ms": float(np.percentile(times, 99))}
    return found


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """The table as lines of text, with times in milliseconds."""
    columns = (f"{name} {p}" for name in ("token", "row", "end") for p in ("p50", "p99"))
    lines = [f"{'at a time':>9}  {'system':<22}{'answers':>8}{'a second':>10}" + "".join(f"{c:>11}" for c in columns)]
    for r in results:
        times = "".join(f"{r[name][p]:>11.1f}" for name in ("token", "row", "end") for p in ("p50_ms", "p99_ms"))
        lines.append(f"{r['concurrency']:>9}  {r['system']:<22}{r['requests']:>8}{r['requests_per_s']:>10.2f}{times}")
    return lines


def verdicts(found: Found, levels: Sequence[int], suffixes: Sequence[str], peers: Sequence[str]) -> list[str]:
    """Lines with medians of the ratios of rates in a round, and the time that a server adds to a single request."""

    def paired(function: Callable[[Any, Any], float], own: str, other: str, level: int) -> float:
        return statistics.median(map(function, found[own, level], found[other, level]))

    def middle(replies: Sequence[Reply]) -> float:
        return statistics.median(reply.end - reply.begun for reply in replies)

    lines = []
    for suffix in suffixes:
        own = f"pipejax{suffix}"
        if (own, levels[0]) not in found:
            continue
        for level in levels:
            others = [f"offline{suffix}", *peers]
            ratios = [f"{paired(lambda a, b: rate(a) / rate(b), own, o, level):.2f} x {o}" for o in others]
            lines.append(f"{own}, {level} at a time: answers a second are {', '.join(ratios)}")
        if 1 in levels:
            more = 1e3 * paired(lambda a, b: middle(a) - middle(b), own, f"offline{suffix}", 1)
            lines.append(f"{own}, alone: {more:.1f} ms more than offline at p50")
    return lines


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers, too
    cli.run(main, sys.argv[1:])
