"""What this machine's processor can do."""

import functools
from pathlib import Path


@functools.cache
def features() -> frozenset[str]:
    """Names of its instruction sets, as Linux gives them ("avx2", "amx_int8"); empty where nobody says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())
