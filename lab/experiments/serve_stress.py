"""Sends thousands of requests to `pipejax serve`: none may be lost, and each answer must equal the answer of `decode`.

    python -m lab.experiments.serve_stress --checkpoint runs/demo_long_pipelined [--requests 10000] [--at-a-time 16]

The prompts are documents of the demo. Requests are mixed: both methods, greedy or sampled, whole or streamed, as text
or as records. Before that, each kind is requested once alone, since a batch of one answer has its own program. The
command prints the growth of the server's resident memory from request 500 to the end. It needs Linux. The exit code is
1 if an answer differs or is lost, or if the memory grew by more than 5 %.
"""

import collections
import contextlib
import http.client
import itertools
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.benchmarks.serve import server
from pipejax.apps import demo
from pipejax.inference.answers import Record
from pipejax.inference.loading import load
from pipejax.system import cli

TEXTS = 64  # different prompts
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"method": "sequential"},
    {"temperature": 1.0, "seed": 3, "n": 2},
    {"method": "sequential", "temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 5},
)
WAYS: tuple[dict[str, Any], ...] = ({}, {"rows": True}, {"stream": True}, {"stream": True, "rows": True})
EARLY, GROWTH = 500, 0.05  # the request at which memory is first measured, and the share by which it may grow


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = cli.Parser(prog="python -m lab.experiments.serve_stress", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--requests", type=cli.whole_number(1), default=10_000, metavar="N")
    parser.add_argument(
        "--at-a-time", type=cli.whole_number(1, 256), default=16, metavar="N", help="simultaneous connections"
    )
    parser.add_argument("--places", type=cli.whole_number(1), default=8, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    flags = parser.parse_args(argv)
    texts = [example.source for example in itertools.islice(demo.examples("test"), TEXTS)]
    cli.note("decoding without a server")
    expected = [offline(flags, settings, texts) for settings in SETTINGS]
    command = ["pipejax", "serve", "--checkpoint", flags.checkpoint, "--port", "0", "--places", str(flags.places)]
    command += ["--best"] if flags.best else []
    with tempfile.TemporaryDirectory() as folder, server(command, Path(folder) / "log") as started:
        memory: dict[int, int] = {}
        wrong, done, numbers = list[str](), itertools.count(1), itertools.count()
        lock = threading.Lock()

        def ask(_: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", started.port, timeout=300)
            with contextlib.closing(connection):
                while (number := next(numbers)) < flags.requests:
                    rng = random.Random(flags.seed << 32 | number)
                    i, k, way = rng.randrange(TEXTS), rng.randrange(len(SETTINGS)), rng.choice(WAYS)
                    found = differs(connection, {"prompt": texts[i]} | SETTINGS[k] | way, expected[k][i])
                    with lock:
                        count = next(done)
                        wrong.extend([f"request {number}: {found}"] if found else [])
                        if count % EARLY == 0 or count == flags.requests:
                            memory[count] = resident(started.process.pid)
                            cli.note(f"{count} requests, {memory[count] >> 20} MB, {len(wrong)} wrong")

        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", started.port, timeout=300)) as connection:
            for (settings, records), way in itertools.product(zip(SETTINGS, expected, strict=True), WAYS):
                if found := differs(connection, {"prompt": texts[0]} | settings | way, records[0]):
                    wrong.append(f"alone, {settings | way}: {found}")
        begun = time.perf_counter()
        with ThreadPoolExecutor(flags.at_a_time) as pool:
            list(pool.map(ask, range(flags.at_a_time)))
        seconds = time.perf_counter() - begun
        left, ends = metrics(started.port), time.monotonic() + 10
        # A client has its last answer before the server has finished the request.
        while any(left.values()) and time.monotonic() < ends:
            left = metrics(started.port)
        started.process.terminate()
        code = started.process.wait(60)
    growth = memory[flags.requests] / memory.get(EARLY, memory[flags.requests]) - 1
    report = {
        "requests": next(done) - 1,
        "requests_per_s": flags.requests / seconds,
        "wrong": wrong[:10],
        "resident_mb": {count: size / 2**20 for count, size in memory.items()},
        "growth": growth,
        "left": left,
        "exit_code": code,
    }
    print(json.dumps(report, indent=1))
    return int(bool(wrong) or code != 0 or any(left.values()) or growth > GROWTH)


def offline(flags: Any, settings: dict[str, Any], texts: Sequence[str]) -> list[list[Record]]:
    """The answers of `decode` to each text, one at a time."""
    names = {"n": "samples"}
    changed = [f"decode.{names.get(key, key)}={value}" for key, value in settings.items() if key != "method"]
    generator = load(flags.checkpoint, best=flags.best, overrides=changed)
    return [generator.decode([text], method=settings.get("method")) for text in texts]


def differs(connection: http.client.HTTPConnection, body: dict[str, Any], expected: Sequence[Record]) -> str:
    """Sends a request; returns the difference from the expected records, or an empty text."""
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
        if reply.status != 200:
            return f"status {reply.status}, {text[:200]}"
        choices = streamed(text) if body.get("stream") else json.loads(text)["choices"]
    except (OSError, ValueError, http.client.HTTPException) as error:
        connection.close()  # the next request opens it again
        return repr(error)
    if len(choices) != len(expected):
        return f"{len(choices)} answers to {body}"
    for choice, record in zip(choices, expected, strict=True):
        if "record" in choice:
            same = {key: choice["record"][key] == value for key, value in record.items() if key != "id"}
        else:
            same = {"text": choice["text"] == record["text"]}
        if not all(same.values()):
            return f"other {', '.join(key for key, is_same in same.items() if not is_same)} to {body}"
    return ""


def streamed(text: str) -> list[dict[str, Any]]:
    """The choices of a stream: the joined text and the fields of the last chunk of each choice."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    if not events or events.pop() != "[DONE]":
        raise ValueError("a stream without an end")
    found: dict[int, dict[str, Any]] = collections.defaultdict(lambda: {"text": ""})
    for event in events:
        for choice in json.loads(event)["choices"]:
            one = found[choice["index"]]
            found[choice["index"]] = one | choice | {"text": one["text"] + choice["text"]}
    return [found[index] for index in sorted(found)]


def resident(pid: int) -> int:
    """The bytes of resident memory of a process."""
    (size,) = re.findall(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(size) << 10


def metrics(port: int) -> dict[str, float]:
    """The numbers of running requests by the server's metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    names = ("active_requests", "places_in_use", "queue_length")
    return {name: float(re.findall(rf"^pipejax_{name} (\S+)$", text, re.MULTILINE)[0]) for name in names}


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
