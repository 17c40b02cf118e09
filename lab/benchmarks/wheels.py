"""Collects wheels on a machine with a network, and installs those that are missing on a machine without one.

    python -m lab.benchmarks.wheels build/gpu-wheels [3.12]

The machine without a network has JAX, Flax, Optax, Orbax, PyTorch and transformers, with the libraries that these
require. The program needs only the standard library.
"""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("pytest", "grain", "sentencepiece")  # for the tests, `pipejax train`, and T5's tokenizer
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST = 60e6  # most bytes of all wheels together


def pins() -> dict[str, str]:
    """The version of each library in the requirements files, with any marker."""
    files = [ROOT / "requirements.txt", *sorted(ROOT.glob("requirements/*.txt"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))


def collect(directory: Path, python: str = PYTHON) -> int:
    """Downloads the wheels, and the wheels that they require, into an emptied directory; returns their bytes.

    Raises:
      ValueError: pip failed, or the wheels have more than `MOST` bytes.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    of_others = [f"--platform={name}" for name in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(directory)]
    command += ["--disable-pip-version-check", "--implementation=cp", f"--python-version={python}", *of_others]
    done = _run([*command, *(f"{name}=={pins()[name]}" for name in NAMES)])
    if done.returncode:
        raise ValueError(f"{directory}: pip downloaded nothing ({_last(done.stderr)})")
    size = sum(path.stat().st_size for path in directory.iterdir())
    if size > MOST:
        raise ValueError(f"{directory}: found {size / 1e6:.0f} MB of wheels; expected at most {MOST / 1e6:.0f}")
    return size


def install(directory: Path, site: Path, *, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Installs missing libraries into an emptied directory for PYTHONPATH; returns installed and failed libraries.

    pip decides which libraries a missing one requires, since it knows the installed versions and this machine.

    Args:
      directory: the directory of the wheels.
      site: the directory to install into.
      names: names of libraries; the libraries that these require are installed as well.
    """
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    found: dict[str, Any] = {"installed": [], "failures": []}
    names = [name for name in names if not _is_installed(name)]
    if names and not directory.is_dir():
        found["failures"].append(f"no wheels in {directory}: make gpu-wheels collects them on a machine with a network")
        return found
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    pip += [f"--find-links={directory}"]
    wanted: dict[str, str] = {}
    for name in names:
        done = _run([*pip, "--dry-run", "--report=-", name])
        if done.returncode:
            found["failures"].append(f"{name}: {_last(done.stderr)}")
            continue
        for each in json.loads(done.stdout)["install"]:
            wanted[each["metadata"]["name"]] = each["download_info"]["url"]
    if wanted:
        done = _run([*pip, "--no-deps", "--no-compile", f"--target={site}", *wanted.values()])
        found["installed" if not done.returncode else "failures"] += sorted(wanted)
        if done.returncode:
            found["failures"].append(_last(done.stderr))
    return found


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


def _last(text: str) -> str:
    """The last line that is not empty."""
    return ([line for line in text.splitlines() if line.strip()] or ["pip failed"])[-1][:300]


def main(argv: Sequence[str]) -> int:
    """The command line."""
    if not 1 <= len(argv) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    directory = Path(argv[0])
    try:
        size = collect(directory, *argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{directory}: {len(list(directory.iterdir()))} wheels for Python {(*argv, PYTHON)[1]}, {size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
