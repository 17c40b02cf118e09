"""The processor of this machine: its architecture and its instruction sets."""

import functools
import platform
from pathlib import Path


def is_arm() -> bool:
    """Returns whether this machine has a 64-bit Arm processor, including Apple's."""
    return platform.machine().lower() in ("aarch64", "arm64")


@functools.cache
def features() -> frozenset[str]:
    """Returns the names of the processor's instruction sets in Linux, such as "amx_int8"; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())
