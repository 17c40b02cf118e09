"""Reads JAX's profiler: the kernels of a call on a device, and the time in which the device waits."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from lab.benchmarks.peers.worker import error_line

GAP = 10e-6  # seconds; longer gaps between kernels are counted
MOST = 12  # most kernels that are named
LINES = ("Stream", "tf_XLA")  # lines of a trace: a GPU's kernels, and a CPU's threads, whose figures mean little


def least(call: Callable[[], Any], rounds: int = 7) -> float:
    """The seconds of the fastest of `rounds` calls, after one call that is not counted."""
    times = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def try_profile(call: Callable[[], Any]) -> dict[str, Any]:
    """Returns the result of `profiled` as "profile", or the reason why the profiler fails as "no_profile"."""
    try:
        return {"profile": profiled(call)}
    except Exception as error:  # errors of CUDA's profiling library, for example without the permission to use it
        return {"no_profile": error_line(error)}


def profiled(call: Callable[[], Any]) -> dict[str, Any]:
    """The seconds of a call that has been made before, the seconds of its kernels, and the slowest kernels.

    The call must wait until the device has finished. It is made once without the profiler, which slows the host, and
    once with it. XLA starts each kernel by itself while the profiler runs, without CUDA graphs.
    """
    begun = time.perf_counter()
    call()
    seconds = time.perf_counter() - begun
    with tempfile.TemporaryDirectory() as scratch:
        with jax.profiler.trace(scratch):
            call()
        traces = [ProfileData.from_file(str(path)) for path in Path(scratch).rglob("*.xplane.pb")]
    return {"seconds": seconds} | kernels(event for trace in traces for event in events(trace))


def events(trace: ProfileData) -> Iterator[tuple[str, float, float]]:
    """Yields the name, the start and the end in seconds of each kernel."""
    planes = [*trace.planes]
    for plane in [p for p in planes if p.name.startswith("/device:GPU")] or planes:
        for thread in plane.lines:
            if (thread.name or "").startswith(LINES):
                for event in thread.events:
                    yield event.name, 1e-9 * event.start_ns, 1e-9 * event.end_ns


def kernels(given: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """Counts kernels, sums the time in which any kernel runs and the long gaps, and names the slowest kernels."""
    found = sorted(given, key=lambda event: event[1])
    busy, until, gaps = 0.0, found[0][1] if found else 0.0, list[float]()
    for _, begin, end in found:
        if begin - until >= GAP:
            gaps.append(begin - until)
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    seconds, count = Counter[str](), Counter[str]()
    for name, begin, end in found:
        seconds[name] += end - begin  # type: ignore[assignment]
        count[name] += 1
    most = sorted(seconds, key=seconds.__getitem__, reverse=True)[:MOST]
    return {
        "kernels": len(found),
        "busy_s": busy,
        "gaps": len(gaps),
        "gaps_s": sum(gaps),
        "most": [{"name": name[:80], "seconds": seconds[name], "count": count[name]} for name in most],
    }
