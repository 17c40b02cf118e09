"""Runs of several processes on JAX's distributed runtime: joining, exchanging messages, and failing together.

With one process, the functions return at once. This module does not start processes; docs/clusters.md describes that
for srun, mpirun, Kubernetes, Ray and ssh.
"""

import collections
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # has the client of the coordination service
from jax._src.clusters import GceTpuCluster, GkeTpuCluster  # the detection that jax.distributed.initialize() uses
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.system import strict_json
from pipejax.system.errors import UserError, join_hints

HEARTBEAT = 60  # seconds of silence after which a process counts as dead and the other processes end
PATIENCE = 3_600_000  # milliseconds to wait for a message from a process that still sends heartbeats
# Launchers' variables for the number of processes, the process's rank, and its rank on its machine.
LAUNCHERS = (
    ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
T = TypeVar("T")
TPU_CLUSTERS = (GkeTpuCluster, GceTpuCluster)
_SHARED = "shared_by_all_processes"  # the attribute of an exception that all processes raise


def shared(error: BaseException) -> bool:
    """Returns whether all processes raised this error."""
    return hasattr(error, _SHARED)


def join_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat: int = HEARTBEAT,
    patience: float = 300.0,
    alone: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> bool:
    """Joins the processes of this run; returns whether there are several.

    The function must be called before anything uses a device.

    Args:
      coordinator: HOST:PORT of process 0; None: from the environment.
      processes: the number of processes; None: from the environment.
      process_id: the index of this process; None: from the environment.
      heartbeat: seconds of silence after which a process counts as dead.
      patience: seconds to wait for process 0.
      alone: whether to run a single process, regardless of the environment.
      environment: the variables of the launcher.

    Raises:
      UserError: the values contradict each other, or process 0 cannot be reached.
    """
    if alone:
        return False
    coordinator = coordinator or environment.get("PIPEJAX_COORDINATOR") or None
    told = _from_launcher(environment)
    processes = _whole_number("processes", processes, environment)
    if processes is None:
        processes = told[0] if told else None
    elif not 1 <= processes < 2**20:
        raise UserError("--processes", found=f"{processes}", expected="at least 1")
    process_id = _whole_number("process_id", process_id, environment)
    if process_id is None and told:
        process_id = told[1]
    if coordinator is None and not (told or _detected_by_jax(environment)):
        if processes is None and process_id is None:
            return False
        raise UserError("--coordinator", found="none", expected="HOST:PORT of process 0, for every process of the run")
    if coordinator is not None:
        if not re.fullmatch(r"[^\s:]+:[0-9]{1,5}|\[[0-9a-fA-F:.]+\]:[0-9]{1,5}", coordinator):
            raise UserError("--coordinator", found=f"{coordinator!r}", expected="HOST:PORT, such as node0:8476")
        if not 1 <= int(coordinator.rpartition(":")[2]) <= 65535:
            raise UserError("--coordinator", found=f"{coordinator!r}", expected="a port from 1 to 65535")
        if processes is None or process_id is None:
            missing = "--processes" if processes is None else "--process-id"
            raise UserError(
                missing, found="none", expected="a value with --coordinator", hint="the launcher does not provide it"
            )
        if not 0 <= process_id < processes:
            raise UserError("--process-id", found=f"{process_id}", expected=f"0 to {processes - 1}")
    if processes == 1:
        return False
    if not 1 <= heartbeat <= 86400:
        raise UserError("--heartbeat", found=f"{heartbeat}", expected="1 to 86400 seconds")
    if coordinator is not None and process_id != 0:
        _await(coordinator, patience)
    own_device = [told[2]] if told and "JAX_LOCAL_DEVICE_IDS" not in environment else None
    # The service would handle SIGTERM, which the trainer handles.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, processes, process_id, own_device, heartbeat_timeout_seconds=heartbeat)
    except (RuntimeError, ValueError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"--coordinator {coordinator or '(found by JAX)'}",
            f"process {process_id} of {processes} could not join ({said})",
            expected="process 0 to listen there and every process to be started",
        ) from error
    return True


def _await(coordinator: str, patience: float) -> None:
    """Waits until process 0 accepts connections.

    Raises:
      UserError: process 0 does not accept connections within `patience` seconds.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--coordinator {coordinator}",
                    f"no answer in {patience:.0f} s ({error})",
                    expected="process 0 to listen there",
                ) from error
        time.sleep(0.2)


def _whole_number(name: str, value: int | None, environment: Mapping[str, str]) -> int | None:
    """Returns the value or, if it is None, the whole number in the variable PIPEJAX_NAME; None without either."""
    text = environment.get(f"PIPEJAX_{name.upper()}", "")
    if value is not None or not text:
        return value
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UserError(f"PIPEJAX_{name.upper()}", found=f"{text!r}", expected="a whole number")
    return int(text)


def _from_launcher(environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Returns the number of processes, the rank and the local rank that srun or mpirun set.

    The result is None unless there are several processes. Variables of srun count only within a step.
    """
    for names in LAUNCHERS:
        values = [environment.get(name, "") for name in names]
        started = names[0] != "SLURM_NTASKS" or "SLURM_STEP_NODELIST" in environment
        if started and all(value.isdigit() for value in values) and int(values[0]) > 1:
            return int(values[0]), int(values[1]), int(values[2])
    return None


def _detected_by_jax(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX can detect the processes of an indexed Kubernetes job or of Cloud TPU machines."""
    job = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    if job and importlib.util.find_spec("kubernetes") is not None:
        return True
    try:
        return any(cluster.is_env_present() and cluster.get_process_count() > 1 for cluster in TPU_CLUSTERS)
    except (OSError, RuntimeError, ValueError, LookupError) as error:
        # The exception comes from `requests`, or from parsing the answer.
        said = " ".join(str(error).split())[:200]
        raise UserError(
            "the metadata of this Cloud TPU machine",
            found=f"no usable answer ({said})",
            expected="the processes of the run; --alone trains in one process",
        ) from error


def lost(error: BaseException) -> bool:
    """Returns whether the error means that another process of the run ended or cannot be reached."""
    words = r"gloo|nccl|connection (reset|closed|refused)|coordination service|heartbeat|broken pipe|deadline_exceeded"
    return isinstance(error, RuntimeError | ValueError) and bool(re.search(words, str(error), re.I)) and several()


def several() -> bool:
    """Returns whether the run has several processes."""
    return jax.process_count() > 1


def first() -> bool:
    """Returns whether this is process 0, which writes the log, the config and the lines for the user."""
    return jax.process_index() == 0


def gather_texts(text: str) -> list[str]:
    """Returns the texts of all processes, by index. Every process must call this."""
    if not several():
        return [text]
    encoded = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(encoded.size))
    content = np.pad(encoded, (0, max(lengths.max(), 1) - encoded.size))
    rows = multihost_utils.process_allgather(content)
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def check_same(text: str, what: str) -> None:
    """Checks that all processes have the same text. Every process must call this.

    Raises:
      UserError: the texts differ; `what` names them in the message.
    """
    words = gather_texts(hashlib.sha256(text.encode()).hexdigest())
    for index, word in enumerate(words):
        if word != words[0]:
            error = UserError(
                what,
                f"process {index} has a value that differs from process 0",
                expected="the same value in all processes",
            )
            setattr(error, _SHARED, True)
            raise error


@contextlib.contextmanager
def fail_together(*kinds: type[Exception]) -> Iterator[None]:
    """Returns a context manager whose block succeeds in all processes or in none; every process must enter it.

    If one process raises an exception of one of the `kinds`, all processes raise the exception at the end of the block,
    so that no process waits forever for another.
    """
    problem: Exception | None = None
    try:
        yield
    except kinds as error:
        if not several():
            raise
        problem = error
    if not several():
        return
    number = next((i for i, kind in enumerate(kinds) if isinstance(problem, kind)), 0)
    fields = problem.fields() if isinstance(problem, UserError) else {}
    for index, text in enumerate(gather_texts(json.dumps([number, fields, str(problem)]) if problem else "")):
        if text and problem is None:
            which, fields, message = strict_json.loads(text)
            where = f"process {index}"
            if fields:
                problem = UserError(**(fields | {"hint": join_hints(fields.get("hint"), where)}))
            else:
                problem = kinds[which](f"{message} ({where})")
    if problem:
        setattr(problem, _SHARED, True)
        raise problem


@contextlib.contextmanager
def alone(explain: Callable[[BaseException], int], *, joined: bool) -> Iterator[None]:
    """Returns a context manager that ends this process at once if the block raises an error in this process alone.

    Otherwise the other processes would wait for this one. `explain` reports the error and returns the exit code.
    `joined` is the result of `join_processes`, because `several` would ask JAX, which may have no device.
    """
    try:
        yield
    except BaseException as error:
        if not joined or shared(error):
            raise
        code = explain(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def same(value: T) -> T:
    """Returns process 0's value, a JSON value, in every process. Every process must call this."""
    return strict_json.loads(gather_texts(json.dumps(value))[0]) if several() else value


_exchanges = itertools.count()


class Exchange:
    """Exchanges messages between all processes through the coordinator, without a device, from any thread.

    All processes must create their `Exchange` objects, and call each of them, in the same order. Two threads must not
    call one object at the same time.
    """

    def __init__(self) -> None:
        self._name, self._calls = f"pipejax/exchange/{next(_exchanges)}", 0
        self._lock, self._closed = threading.Lock(), False

    def __call__(self, mine: bytes) -> list[bytes]:
        """Sends `mine`, which must not be empty; returns the messages of all processes in this call, by index."""
        if not several():
            return [mine]
        own, call = jax.process_index(), self._calls
        with self._lock:
            if self._closed:
                raise RuntimeError("this exchange is closed")
            self._send(mine)
            self._calls += 1
        said = list[bytes]()
        for i in range(jax.process_count()):
            said.append(mine if i == own else self._client.blocking_key_value_get_bytes(self._key(call, i), PATIENCE))
            if not said[i]:
                raise RuntimeError(f"coordination service: process {i} has closed the exchange")
        if call:  # all processes that sent this message have read the previous ones
            self._client.key_value_delete(self._key(call - 1, own))
        return said

    def close(self) -> None:
        """Waits until all processes have read the last messages, and deletes them."""
        with self._lock:
            if several() and not self._closed:
                self._send(b"")
            self._closed = True

    def _send(self, mine: bytes) -> None:
        self._client.key_value_set_bytes(self._key(self._calls, jax.process_index()), mine)

    def _key(self, call: int, index: int) -> str:
        return f"{self._name}/{call}/{index}"

    @property
    def _client(self) -> Any:
        return distributed.global_state.client


class Vote:
    """Computes the maximum of one number per process; all processes learn it at the same call.

    All processes must make the same number of calls. A call starts a reduction on the devices and returns the result of
    the reduction two calls ago, so that no device waits for a host.
    """

    def __init__(self) -> None:
        self._under_way: collections.deque[jax.Array] = collections.deque()

    def __call__(self, mine: int) -> int:
        """Contributes a number; returns the maximum of two calls ago, 0 in the first two calls."""
        if not several():
            return mine
        said = np.full(jax.local_device_count(), mine, np.int32)
        numbers = jax.make_array_from_process_local_data(NamedSharding(self._mesh, P("all")), said)
        self._under_way.append(jax.jit(jnp.max, out_shardings=NamedSharding(self._mesh, P()))(numbers))
        return int(self._under_way.popleft()) if len(self._under_way) > 2 else 0

    @functools.cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        return jax.make_mesh((jax.device_count(),), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
