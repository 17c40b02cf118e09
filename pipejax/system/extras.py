"""Optional libraries, which pyproject.toml lists as extras: a missing one is a UserError that says what to install."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import types
from collections.abc import Iterator
from pathlib import Path

from pipejax.system.errors import UserError

CLONE = Path(__file__).parents[2]  # or where packages are installed


@contextlib.contextmanager
def extra(name: str, place: object) -> Iterator[None]:
    """A block that imports libraries of the extra `name`; the error begins with `place`, the user of the libraries."""
    try:
        yield
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        raise UserError(
            f"{place}: found no {missing}; expected what the extra pipejax[{name}] installs ({command(name)})"
        ) from error


def module(library: str, name: str, place: object) -> types.ModuleType:
    with extra(name, place):
        importlib.import_module(library.partition(".")[0])
        return importlib.import_module(library)


def command(name: str) -> str:
    """The command that installs an extra: of the clone that this package is in, else by the names of its libraries."""
    if (CLONE / "pyproject.toml").is_file():
        return f"pip install -e '{CLONE}[{name}]'"
    return f"pip install {' '.join(repr(library) for library in libraries(name))}"


def libraries(name: str) -> list[str]:
    found = []
    for line in importlib.metadata.requires("pipejax") or []:
        library, _, marker = line.partition(";")
        inner = re.fullmatch(r"pipejax\[(\w+)\]", library.strip())
        if re.search(rf"extra == ['\"]{name}['\"]", marker):
            found += libraries(inner[1]) if inner else [library.strip()]
    return found


def requirements_of(library: str) -> str:
    """The file of the clone that has the version of a library; requirements.txt if none has it."""
    line = re.compile(rf"{re.sub('[-_]', '[-_]', library)}[=\[]", re.IGNORECASE)
    for file in [*CLONE.glob("requirements.txt"), *sorted(CLONE.glob("requirements/*.txt"))]:
        if any(map(line.match, file.read_text(encoding="utf-8").splitlines())):
            return file.relative_to(CLONE).as_posix()
    return "requirements.txt"


def absent(error: ModuleNotFoundError) -> str:
    """The library that is not installed; "" if it is, and only a part of it is missing."""
    library = (error.name or "").partition(".")[0]
    return library if library and importlib.util.find_spec(library) is None else ""
