"""Optional libraries, which pyproject.toml lists as extras. If one is missing, a UserError names what to install."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import types
from collections.abc import Iterator
from pathlib import Path

from pipejax.system.errors import UserError

CLONE = Path(__file__).parents[2]  # the root of the repository, or the directory of installed packages


@contextlib.contextmanager
def extra(name: str, place: object) -> Iterator[None]:
    """Returns a context manager for importing libraries of the extra `name`.

    Raises:
      UserError: a library is not installed. The message begins with `place`.
    """
    try:
        yield
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        raise UserError(
            place,
            found=f"no {missing}",
            expected=f"the packages of the extra pipejax[{name}]",
            hint=f"{command(name)}",
        ) from error


def module(library: str, name: str, place: object) -> types.ModuleType:
    """Imports a library of the extra `name`; the error message begins with `place`."""
    with extra(name, place):
        importlib.import_module(library.partition(".")[0])
        return importlib.import_module(library)


def command(name: str) -> str:
    """Returns the command that installs an extra.

    In a clone of the repository, the command installs the clone with the extra; elsewhere, the libraries of the extra.
    """
    if (CLONE / "pyproject.toml").is_file():
        return f"pip install -e '{CLONE}[{name}]'"
    return f"pip install {' '.join(repr(library) for library in libraries(name))}"


def libraries(name: str) -> list[str]:
    """Returns the requirements of an extra and of the extras that it includes."""
    found = []
    for line in importlib.metadata.requires("pipejax") or []:
        library, _, marker = line.partition(";")
        inner = re.fullmatch(r"pipejax\[(\w+)\]", library.strip())
        if re.search(rf"extra == ['\"]{name}['\"]", marker):
            found += libraries(inner[1]) if inner else [library.strip()]
    return found


def requirements_of(library: str) -> str:
    """Returns the requirements file with the version of a library; requirements.txt if none has it."""
    line = re.compile(rf"{re.sub('[-_]', '[-_]', library)}[=\[]", re.IGNORECASE)
    for file in [*CLONE.glob("requirements.txt"), *sorted(CLONE.glob("requirements/*.txt"))]:
        if any(map(line.match, file.read_text(encoding="utf-8").splitlines())):
            return file.relative_to(CLONE).as_posix()
    return "requirements.txt"


def absent(error: ModuleNotFoundError) -> str:
    """Returns the library that is not installed; "" if it is installed and only a part of it is missing."""
    library = (error.name or "").partition(".")[0]
    return library if library and importlib.util.find_spec(library) is None else ""
