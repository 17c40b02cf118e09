"""The descendants of a process, and the workers of `pipejax bulk` among them."""

from pathlib import Path


def descendants(process: int) -> list[int]:
    """All processes that a process has started, directly or not."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended meanwhile
            continue
    found = [process]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def workers(leader: int) -> list[int]:
    """The processes of a leader's actors."""
    found = []
    for process in descendants(leader):
        try:
            name = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            continue
        if name.startswith(b"ray::") and b"MapWorker" in name:
            found.append(process)
    return found
