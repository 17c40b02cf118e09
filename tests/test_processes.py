"""Several processes: the flags and variables that join them, and two real processes compared with one."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jax._src.clusters import cloud_tpu_cluster

from pipejax.config import load
from pipejax.system import distributed
from pipejax.system.errors import UserError
from pipejax.training.loop import fit
from support import tiny_run as runs

ROOT = Path(__file__).parents[1]
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[1-4]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture
def joined(monkeypatch):
    """The arguments with which JAX would be called."""
    calls = []

    def initialize(coordinator, count, number, devices, heartbeat_timeout_seconds):
        calls.append((coordinator, count, number, devices))

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    monkeypatch.setattr(distributed, "_await", lambda coordinator, patience: None)
    return calls


@pytest.mark.parametrize(
    "flags, environment, expected",
    [
        ((None, None, None), {}, None),
        ((None, None, None), {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a login shell
        ((None, None, None), {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (("host:1", 1, 0), {}, None),
        (("host:1", 2, 1), {}, ("host:1", 2, 1, None)),
        ((None, None, None), SLURM, (None, 4, 2, [0])),
        ((None, None, None), OPEN_MPI, (None, 4, 3, [1])),
        (("host:1", None, None), OPEN_MPI, ("host:1", 4, 3, [1])),  # Open MPI 5 names no coordinator
        (
            (None, None, None),
            {"PIPEJAX_COORDINATOR": "host:1", "PIPEJAX_PROCESSES": "3", "PIPEJAX_PROCESS_ID": "2"},
            ("host:1", 3, 2, None),
        ),
    ],
)
def test_processes_join_by_flags_or_environment(joined, flags, environment, expected):
    assert distributed.join_processes(*flags, environment=environment) == (expected is not None)
    assert joined == ([expected] if expected else [])


def test_jax_detects_cloud_tpu_processes(joined, monkeypatch):
    """The metadata server, replaced by a dictionary, gives the processes. Without a TPU there is no query."""
    metadata, asked = {"tpu-env": "", "agent-worker-number": "1", "worker-network-endpoints": "10.0.0.1,10.0.0.2"}, []

    def get(key):
        asked.append(key)
        return metadata[key], 200

    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get)
    assert not distributed.join_processes(environment={}) and asked == []
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    assert distributed.join_processes(environment={}) and joined == [(None, None, None, None)]
    assert not distributed.join_processes(environment={}, alone=True) and len(joined) == 1
    metadata["worker-network-endpoints"] = "10.0.0.1"  # a separate machine
    assert not distributed.join_processes(environment={}) and len(joined) == 1
    metadata.clear()
    with pytest.raises(UserError, match=r"Cloud TPU machine: found no usable answer .*; --alone"):
        distributed.join_processes(environment={})


@pytest.mark.parametrize(
    "flags, environment, message",
    [
        ((None, 2, None), {}, r"--coordinator: found none; expected HOST:PORT"),
        (("host", 2, 0), {}, r"--coordinator: found 'host'; expected HOST:PORT"),
        (("host:1", 2, None), {}, r"--process-id: found none"),
        (("host:1", None, 0), {}, r"--processes: found none"),
        (("host:1", 2, 2), {}, r"--process-id: found 2; expected 0 to 1"),
        ((None, None, None), {"PIPEJAX_PROCESSES": "two"}, r"PIPEJAX_PROCESSES: found 'two'; expected a whole number"),
        ((None, None, None), {"PIPEJAX_PROCESSES": "9" * 5000}, r"PIPEJAX_PROCESSES: found '999"),
        ((None, None, None), {"PIPEJAX_PROCESSES": "0"}, r"--processes: found 0; expected at least 1"),
        ((None, 0, None), {}, r"--processes: found 0; expected at least 1"),
        ((None, 10**30, None), {}, r"--processes: found 1000"),
        ((None, 2**20, None), {}, r"--processes: found 1048576"),
        # A step of a single process does not say how many processes the run has.
        (("host:1", None, None), {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, r"--processes: found none"),
        (("host:70000", 2, 1), {}, r"--coordinator: found 'host:70000'; expected a port from 1 to 65535"),
        (("host:0", 2, 1), {}, r"--coordinator: found 'host:0'; expected a port from 1 to 65535"),
        (("[::1]", 2, 1), {}, r"--coordinator: found '\[::1\]'; expected HOST:PORT"),
        (("http://host:1", 2, 1), {}, r"--coordinator: found 'http://host:1'; expected HOST:PORT"),
    ],
)
def test_invalid_flags_are_refused_before_waiting(joined, flags, environment, message):
    with pytest.raises(UserError, match=message):
        distributed.join_processes(*flags, environment=environment)
    assert joined == []


def test_absent_coordinator_raises_one_line():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(UserError, match=f"--coordinator {place}: no answer in 0 s"):
            distributed.join_processes(place, 2, 1, patience=0.1)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The config of a tiny model whose batches all have one shape."""
    return runs.prepare(tmp_path_factory.mktemp("tiny"))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(config, workdir, count, *settings, second=()):
    port = free_port()
    # One device for each process, and few threads, since the machine may have two cores.
    environment = {**os.environ, "NPROC": "2", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    several = [f"--coordinator=127.0.0.1:{port}", f"--processes={count}", "--heartbeat=10"] if count > 1 else []
    flags = [*(f"--set={setting}" for setting in settings), *several]
    command = [sys.executable, "train.py", f"--config={config}", f"--workdir={workdir}", *flags]
    return [
        subprocess.Popen(
            [*command, *([f"--process-id={i}"] if count > 1 else []), *(second if i else ())],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip


def end(started):
    """The return codes and the lines on standard error."""
    said = [process.communicate(timeout=300)[1].splitlines() for process in started]
    return [process.returncode for process in started], said


def of(directory, event):
    return [line for line in runs.metrics(directory) if line["event"] == event]


@pytest.mark.slow
def test_two_processes_equal_one_and_end_together(config, tmp_path):
    """A signal to one of them ends both at the same step; the resumed pair ends like one process."""
    settings = ("decode.batch_size=1", "train.evaluate_examples=0", "train.evaluate_every=6")
    alone, workdir = tmp_path / "alone", tmp_path / "run"
    assert fit(load(config, ["train.steps=8", "mesh.data=1", *settings]), alone) == 0  # this process counts as one, too
    started = start(config, workdir, 2, "train.steps=100000", *settings)
    wait_for_step(workdir, 6, started)
    started[1].send_signal(signal.SIGTERM)
    codes, said = end(started)
    assert codes == [143, 143] and all(line == [] for line in said[1:]), "only the first process speaks"
    steps = runs.committed(workdir)
    # The log had step 6: its evaluation was running or about to start.
    assert f"at step {steps[-1]};" in said[0][-1] and runs.steps_made(workdir) == steps[-1] == 6
    assert not of(workdir, "evaluation")
    assert end(start(config, workdir, 2, "train.steps=8", *settings))[0] == [0, 0]
    assert runs.committed(workdir) == [4, 6, 8] and runs.committed(alone) == [4, 8]
    results = {}
    for directory in (alone, workdir):
        assert [line["step"] for line in of(directory, "evaluation")] == [6, 8]
        results[directory] = [line["loss"] for line in of(directory, "train")]
        results[directory] += [line[k] for line in of(directory, "evaluation") for k in ("dev_loss", "em_f1", "steps")]
    assert len(results[alone]) == 8 + 2 * 3
    assert results[workdir] == pytest.approx(results[alone], rel=1e-6, abs=1e-6)  # sums of float32 in another order


@pytest.mark.long
def test_a_process_that_is_killed_ends_the_other(config, tmp_path):
    workdir = tmp_path / "run"
    started = start(config, workdir, 2, "train.steps=100000", "train.evaluate_every=100000")
    wait_for_step(workdir, 6, started)
    started[1].kill()
    begun = time.monotonic()
    codes, said = end(started)
    assert codes[0] != 0 and time.monotonic() - begun < 60 and runs.committed(workdir)
    assert "Traceback" not in "".join(said[0])


def wait_for_step(workdir, step, started):
    deadline = time.monotonic() + 250
    while time.monotonic() < deadline and runs.steps_made(workdir) < step:
        assert all(process.poll() is None for process in started), end(started)
        time.sleep(0.1)


EXCHANGE = """
import os, sys, time
from jax._src import distributed
from pipejax.system import distributed as pipejax_distributed

own = int(sys.argv[2])
pipejax_distributed.join_processes(sys.argv[1], 2, own, heartbeat=5)
exchange, gone = pipejax_distributed.Exchange(), pipejax_distributed.Exchange()
for call in range(4):
    said = exchange(b"%d of %d" % (call, own))
    assert said == [b"%d of 0" % call, b"%d of 1" % call], said
if own == 0:
    try:
        exchange(b"more")
    except RuntimeError as error:
        assert pipejax_distributed.lost(error), error
    held = [key for key, _ in distributed.global_state.client.key_value_dir_get_bytes("pipejax/exchange/0")]
    print(sorted(held), flush=True)
    gone(b"is anybody there")
    print("told by nobody")
else:
    time.sleep(0.5)  # so that the other waits
    exchange.close()
    while not distributed.global_state.client.key_value_dir_get_bytes("pipejax/exchange/1"):
        time.sleep(0.1)
    os._exit(0)
"""


@pytest.mark.slow
def test_exchange_deletes_read_values_and_ends_with_its_members():
    place = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", EXCHANGE, place, str(i)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    (out, err), (_, other) = (process.communicate(timeout=200) for process in started)
    # The last call of both processes, the waiting call, and the end of the other process.
    keys = [f"pipejax/exchange/0/{key}" for key in ("3/0", "3/1", "4/0", "4/1")]
    assert out.splitlines() == [str(keys)], err
    assert started[1].returncode == 0, other
    assert started[0].returncode != 0, "the wait for a process that is gone has an end"


@pytest.mark.slow
def test_processes_with_different_settings_are_refused(config, tmp_path):
    codes, said = end(start(config, tmp_path / "run", 2, second=["--set=train.seed=1"]))
    assert codes == [2, 2], said
    line = (
        "error: the config: process 1 has a value that differs from process 0; expected the same value in all processes"
    )
    assert [lines[-1] for lines in said] == [line, line]
