"""The processor of this machine: its kind, and its abilities."""

import functools
import platform
from pathlib import Path


def is_arm() -> bool:
    """Whether it is an Arm of 64 bits, also Apple's."""
    return platform.machine().lower() in ("aarch64", "arm64")


@functools.cache
def features() -> frozenset[str]:
    """Names of its instruction sets, as Linux gives them ("avx2", "amx_int8"); empty where nobody says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())
