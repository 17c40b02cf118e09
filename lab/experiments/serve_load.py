"""Measures how long many clients wait for `pipejax serve`, with default flags and an empty cache of programs.

    python -m lab.experiments.serve_load --checkpoint DIR [--clients 64] [--bad 5] [--new 1] [--requests 2000]

Sources are random ids of all lengths up to the longest that the run accepts. Requests are whole or streamed, greedy,
sampled or scored, with the method of the run. Some clients (`--other`) request the other method, whose programs the
warm-up does not compile; some (`--bad`) send schemas that are designed to be slow, each of them new; and some (`--new`)
send usual schemas that are new. The load begins when /readyz returns 200. The report has the seconds until then, the
waits of each kind of client until the first byte and until the end, the statuses, and the growth of the server's memory
after the first tenth of the requests. The command needs Linux. The exit code is 1 if a usual client waited longer than
`--most` seconds, a request got the status 500, or a request was still running at the end.
"""

import collections
import contextlib
import http.client
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.benchmarks.serve import PATIENCE, server
from lab.experiments.serve_stress import metrics, resident
from pipejax.system import cli
from pipejax.system.errors import UserError

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"rows": True},
    {"stream": True},
    {"logprobs": 0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "n": 2, "stream": True},
)
SLOW = (
    "^((a{0,1000}){0,1000}){0,1000}q%d$",
    "q%da.{15}b",
    "q%d(a|b|ab)*c.{12}d",
    "^(.{0,99}x){0,99}q%d$",
    "q%d(a{0,99}b{0,99}){0,99}",
)  # each schema has a number that makes it new
IDS = 3, 60  # ids that are words in every vocabulary
SHARES = (0.5, 0.9, 0.99, 1.0)


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = cli.Parser(prog="python -m lab.experiments.serve_load", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--clients", type=cli.whole_number(1, 256), default=64, metavar="N")
    parser.add_argument("--bad", type=cli.whole_number(0, 64), default=5, metavar="N", help="clients with slow schemas")
    parser.add_argument(
        "--new", type=cli.whole_number(0, 64), default=0, metavar="N", help="clients with new schemas of a usual kind"
    )
    parser.add_argument(
        "--other", type=cli.whole_number(0, 64), default=2, metavar="N", help="clients that request the other method"
    )
    parser.add_argument("--requests", type=cli.whole_number(1, 10**5), default=2000, metavar="N")
    parser.add_argument(
        "--seconds", type=cli.whole_number(1, 3600), default=120, metavar="S", help="most seconds of the load"
    )
    parser.add_argument(
        "--most", type=cli.whole_number(1), default=2, metavar="S", help="most seconds that a usual client may wait"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    flags = parser.parse_args(argv)
    command = ["pipejax", "serve", "--checkpoint", flags.checkpoint, "--port", "0", *(["--best"] if flags.best else [])]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PIPEJAX_CACHE"] = f"{folder}/cache"  # the server's cache
        with server(command, Path(folder) / "log") as started:
            begun = time.monotonic()
            while get(started.port, "/readyz")[0] != 200:
                if time.monotonic() > begun + PATIENCE:
                    raise UserError("/readyz", found=f"no 200 after {PATIENCE:g} s")
                time.sleep(0.1)
            cli.note(f"ready after {time.monotonic() - begun:.1f} s")
            report = {"ready_s": time.monotonic() - begun} | load(flags, started.port, started.process.pid)
            started.process.terminate()
            report["exit_code"] = started.process.wait(60)
    print(json.dumps(report, indent=1))
    statuses, slowest = report["statuses"], report["waits"]["usual"]["first"][-1]
    failed = any(status not in ("200", "429") for status in statuses["usual"]) or "500" in str(statuses)
    return int(failed or slowest > flags.most or any(report["left"].values()) or report["exit_code"] != 0)


def load(flags: Any, port: int, pid: int) -> dict[str, Any]:
    """Sends the requests of all clients; returns the report, with waits in seconds by kind of client at SHARES."""
    model = json.loads(get(port, "/v1/models")[1])["data"][0]
    others = [name for name in model["methods"] if name != model["default_method"]]
    kinds = ["bad"] * flags.bad + ["new"] * flags.new + ["other"] * (flags.other if others else 0)
    kinds += ["usual"] * (flags.clients - len(kinds))
    waits: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    statuses: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in kinds}
    memory, numbers, ends = list[int](), itertools.count(), time.monotonic() + flags.seconds
    lock = threading.Lock()

    def ask(kind: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        with contextlib.closing(connection):
            while (number := next(numbers)) < flags.requests and time.monotonic() < ends:
                rng = random.Random(flags.seed << 32 | number)
                ids = [rng.randint(*IDS) for _ in range(rng.randint(1, model["max_prompt_tokens"] - 1))]
                body = {"prompt": [*ids, 1]} | rng.choice(WAYS)
                if kind == "other":
                    body["method"] = others[0]
                elif kind in ("bad", "new"):
                    text = {"type": "string", "pattern": rng.choice(SLOW) % number}
                    properties = {"a": text} if kind == "bad" else {f"n{number}": {"type": "string", "maxLength": 9}}
                    schema = {"type": "object", "properties": properties}
                    body = {
                        "prompt": [*ids, 1],
                        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
                    }
                status, first, end = timed(connection, body)
                with lock:
                    waits[kind].append((first, end))
                    statuses[kind][status] += 1
                    if number >= flags.requests // 10 and number % max(flags.requests // 10, 1) == 0:
                        memory.append(resident(pid))

    begun = time.monotonic()
    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(ask, kinds))
    seconds = time.monotonic() - begun
    left, ends = metrics(port), time.monotonic() + 60
    while any(left.values()) and time.monotonic() < ends:
        left = metrics(port)
        time.sleep(0.1)
    return {
        "clients": dict(collections.Counter(kinds)),
        "requests": sum(map(len, waits.values())),
        "requests_per_s": sum(map(len, waits.values())) / seconds,
        "shares": SHARES,
        "waits": {kind: quantiles(found) for kind, found in waits.items() if found},
        "statuses": statuses,
        "resident_mb": [size >> 20 for size in memory],
        "left": left,
    }


def quantiles(waits: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    """The seconds until the first byte and until the end, at SHARES of the requests."""
    found = {}
    for name, column in zip(("first", "end"), zip(*waits, strict=True), strict=True):
        rising = sorted(column)
        found[name] = [round(rising[int(share * (len(rising) - 1))], 3) for share in SHARES]
    return found


def timed(connection: http.client.HTTPConnection, body: dict[str, Any]) -> tuple[str, float, float]:
    """Sends a request; returns its status or error, and the seconds until the first and the last byte of the body."""
    begun = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read(1)
        first = time.perf_counter() - begun
        reply.read()
        status = str(reply.status)
    except (OSError, http.client.HTTPException) as error:
        connection.close()  # the next request opens it again
        status, first = type(error).__name__, time.perf_counter() - begun
    return status, first, time.perf_counter() - begun


def get(port: int, path: str) -> tuple[int, str]:
    """The status and text of a page."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
