"""Ray processes that decode blocks: a pool of Ray Data actors, on this machine or on a cluster."""

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pipejax.apps.bulk.blocks import Block
from pipejax.apps.bulk.workers import BulkWork, Said, Worker, describe, result_or_error
from pipejax.system import strict_json
from pipejax.system.errors import UserError, first_line
from pipejax.system.extras import extra
from pipejax.system.strict_json import JsonObject

DEVICES = ("GPU", "TPU")  # in Ray's naming
TASKS = 2000  # the most tasks; a task has one block or a few, because Ray spends some milliseconds per task
STORE = 100 * 2**20  # bytes of Ray's object store, which never holds large objects
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DEDUP_LOGS": "0"}


@contextlib.contextmanager
def start(address: str | None = None, workers: int | None = None) -> "Iterator[RayPool]":
    """Returns a context manager that yields a pool of actors; an error of Ray becomes a UserError of one line.

    Args:
      address: the cluster's address; None: this machine.
      workers: the number of actors; None: one per device, or one per machine without a GPU or TPU.
    """
    os.environ |= {name: os.environ.get(name, value) for name, value in QUIET.items()}
    with extra("ray", "bulk"):
        import ray
        import ray.data
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)  # Ray's log files keep everything
    address = address or os.environ.get("RAY_ADDRESS")
    cores = max(os.cpu_count() or 1, workers or 1)
    here = {"num_cpus": cores, "object_store_memory": STORE, "include_dashboard": False}
    options: JsonObject = {"log_to_driver": False, "logging_level": logging.CRITICAL} | ({} if address else here)
    # Ray prints long reports about processes that died.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            with _silent():
                ray.init(address or "local", **options)
            # Ray's own handler exits with code 1.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
            yield RayPool(ray, workers)
        except ConnectionError as error:
            raise UserError(
                f"--address {address}", f"no answer ({first_line(error)})", expected="a Ray cluster"
            ) from error
        except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
            said = first_line(error)
            raise UserError(
                problem=f"Ray failed ({said}); the written shards are kept, and the same command resumes the work"
            ) from error
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Returns a context manager in which nothing is written to standard error.

    The context manager hides a line in which Ray's C++ code reports that Ray was asked to be quiet.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class RayPool:
    """A `bulk.Pool` of Ray actors. An actor that is killed is restarted, and its blocks are assigned again."""

    def __init__(self, ray: Any, workers: int | None) -> None:
        self.ray, have = ray, ray.cluster_resources()
        device = next((name for name in DEVICES if have.get(name)), None)
        machines = sum(bool(node["Alive"]) for node in ray.nodes())
        most = int(have[device] if device else have["CPU"])
        self.workers = workers or (most if device else machines)
        if self.workers > most:
            raise UserError(
                "--workers", found=f"{self.workers}", expected=f"at most {most}, the {device or 'CPU'}s of the cluster"
            )
        self.needs: JsonObject = {"num_cpus": 1}
        if device:
            self.needs |= {"num_gpus": 1} if device == "GPU" else {"resources": {device: 1}}

    def ask(self, work: BulkWork) -> Said:
        """Returns the result of `describe`, computed by one actor."""
        said: Said = self.ray.get(self.ray.remote(max_calls=1, **self.needs)(result_or_error).remote(describe, work))
        return said

    def map(self, work: BulkWork, blocks: Sequence[tuple[str, Block]]) -> Iterator[Said]:
        """Yields the result of `Worker` for each block, in any order."""
        data = self.ray.data
        data.DataContext.get_current().enable_progress_bars = False
        rows = [{"block": json.dumps(block)} for block in blocks]
        said = data.from_items(rows, override_num_blocks=min(len(rows), TASKS)).map_batches(
            _Actor,
            fn_constructor_args=(work,),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=min(self.workers, len(rows))),
            **self.needs,
        )
        for row in said.iter_rows():
            yield strict_json.loads(row["said"])


class _Actor(Worker):
    """The callable that Ray Data runs in each process."""

    def __call__(self, batch: Any) -> dict[str, list[str]]:  # type: ignore[override]
        name, block = strict_json.loads(batch["block"][0])
        return {"said": [json.dumps(super().__call__(name, Block(*block)))]}
