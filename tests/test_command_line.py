"""Mistyped, incomplete and interrupted commands end with one line that states the cause correctly."""

import errno
import os
import pty
import select
import signal
import subprocess
import sys
import tty
from pathlib import Path
from typing import Any

import pytest

from pipejax.__main__ import main
from pipejax.system import cli, environment, extras
from pipejax.system.errors import UserError, did_you_mean
from pipejax.system.progress import Progress
from pipejax.training.stop import Stop
from support.refusals import refuses

ROOT = Path(__file__).parents[1]


def python(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, **options
    )


# Words.


@pytest.mark.parametrize(
    "command, place, texts",
    [
        ("evaluate --checkpoint x --split tset", "--split", ["'tset'", "train, dev, test (did you mean test?)"]),
        (
            "decode --checkpoint x --method seqential",
            "--method",
            ["pipelined, sequential (did you mean sequential?)"],
        ),
        ("bulk --checkpoint x --method Pipelined", "--method", ["'Pipelined'", "(did you mean pipelined?)"]),
        ("export x y --method grid", "--method", ["'grid'", "pipelined, sequential"]),
        ("export x y --platforms cpu,cudda", "--platforms", ["'cudda'", "cpu,cuda,tpu (did you mean cuda?)"]),
        ("metrics rogue in.jsonl", "metric", ["'rogue'", "exact, ", "(did you mean rouge?)"]),
        ("decode --checkpiont x", "--checkpiont", ["(did you mean --checkpoint?)"]),
        ("decode --batch_size 3", "--batch_size", ["(did you mean --batch-size?)"]),
        ("decode -checkpoint x", "-checkpoint", ["(did you mean --checkpoint?)"]),
        ("convert from-hf --dtyp x a b", "--dtyp", []),
        ("convert to-hf --bestt a b", "--bestt", ["(did you mean --best?)"]),
        ("convert from_hf a b", "pipejax convert", ["'from_hf'", "(did you mean from-hf?)"]),
        ("checkpoint verfy x", "action", ["'verfy'", "(did you mean verify?)"]),
        ("checkpoint --jsno x", "--jsno", ["(did you mean --json?)"]),
        ("data stat jsonl", "pipejax data", ["'stat'", "(did you mean stats?)"]),
        ("data stats msq", "TASK", ["'msq'", "(did you mean msqa?)"]),
        (
            "plan --config {root}/configs/jsonl.py --model v1_1-bse",
            "model",
            ["'v1_1-bse'", "(did you mean v1_1-base?)"],
        ),
        ("plan --config {root}/configs/demo.py --target h10", "--target", ["'h10'", "(did you mean h100?)"]),
        ("decod --checkpoint x", "pipejax", ["'decod'", "(did you mean decode?)"]),
        ("Train", "pipejax", ["'Train'", "(did you mean train?)"]),
        ("xyzzy", "pipejax", ["'xyzzy'", "train, ", ", picture"]),
        (
            "train --config {root}/configs/demo.py --workdir r --set train.method=seqential",
            "train.method",
            ["one of pipelined, sequential (did you mean sequential?)"],
        ),
        ("train --config {root}/configs/demo.py --workdir r --set train.method=seq", "train.method", ["'seq'"]),
        (
            "train --config {root}/configs/demo.py --workdir r --set train.init_best=true",
            "train.init_best",
            ["train.init_from"],
        ),
    ],
)
def test_misspelt_argument_is_refused_and_writes_nothing(
    command: str, place: str, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refuses(place, *texts) as refused:
        main(command.format(root=ROOT).split())
    assert "none" not in str(refused.value).split(";")[0] and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "found, known, hint",
    [
        ("tset", ("train", "dev", "test"), "test"),
        ("SEQUENTIAL", ("pipelined", "sequential"), "sequential"),
        ("seq", ("pipelined", "sequential"), "sequential"),
        ("t", ("train", "test"), ""),  # two words begin so
        ("", ("", "a"), ""),
        (3, ("a",), ""),
        ("avx521", ("off", "amx", "avx512", "avx2"), "avx512"),
    ],
)
def test_nearest_word_is_suggested(found: object, known: tuple[str, ...], hint: str) -> None:
    assert did_you_mean(found, known) == (f"did you mean {hint}?" if hint else "")


# Absent systems and libraries.

HIDE = "import sys; sys.modules.update(dict.fromkeys({names}))\n"


@pytest.mark.parametrize("module", ["pipejax", "train", "decode", "lab.demo"])
def test_system_without_required_modules_raises_one_line(module: str) -> None:
    names = "fcntl", "resource"
    code = f"import runpy; sys.argv = ['-m']; runpy._run_module_as_main({module!r})"
    ended = python("-c", HIDE.format(names=names) + code, cwd=ROOT)
    assert ended.returncode == 2 and ended.stdout == "", ended.stderr
    assert ended.stderr.startswith(f"error: found the system {sys.platform!r}, whose Python lacks fcntl and resource; ")
    assert ended.stderr.endswith("or macOS on Apple silicon\n") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "platform, machine, bits, absent, line",
    [
        ("win32", "AMD64", 2**63 - 1, {"fcntl", "resource"}, "native Windows.*; wsl --install sets up WSL2$"),
        ("darwin", "x86_64", 2**63 - 1, {"jax"}, "Python for a Mac with an Intel.*on Apple silicon$"),
        ("darwin", "x86_64", 2**63 - 1, set(), ""),  # built from source
        ("darwin", "arm64", 2**63 - 1, {"jax"}, ""),  # it can be installed; another line reports that
        ("linux", "aarch64", 2**63 - 1, {"jaxlib"}, ""),
        ("linux", "armv7l", 2**31 - 1, {"jax"}, "Python of 32 bits"),
    ],
)
def test_unsupported_platforms_are_refused(
    monkeypatch: pytest.MonkeyPatch, platform: str, machine: str, bits: int, absent: set[str], line: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys, "maxsize", bits)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else object())
    if line:
        with pytest.raises(UserError, match=line):
            environment.check_platform()
    else:
        environment.check_platform()


@pytest.mark.parametrize("system, factor", [("darwin", 1), ("linux", 1024)])
def test_memory_is_counted_in_the_systems_unit(monkeypatch: pytest.MonkeyPatch, system: str, factor: int) -> None:
    import resource

    from pipejax.offline import evaluation

    usage = type("Usage", (), {"ru_maxrss": 5000})
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(sys, "platform", system)
    assert evaluation.peak_memory() == {"peak_host_bytes": 5000 * factor}


@pytest.mark.parametrize(
    "module, absent, library",
    [
        ("lab.demo", ("numpy", "jax"), "numpy"),
        ("lab.faults", ("jax",), "jax"),
        ("lab.benchmarks.decode", ("jax",), "jax"),
        ("lab.benchmarks.train", ("jax",), "jax"),
    ],
)
def test_experiment_without_its_libraries_raises_one_line(module: str, absent: tuple[str, ...], library: str) -> None:
    code = f"import runpy; sys.argv = ['-m']; runpy._run_module_as_main({module!r})"
    ended = python("-c", HIDE.format(names=absent) + code, cwd=ROOT)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"error: found no {library} for {sys.executable}; expected what requirements.txt")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "library, file",
    [
        ("jax", "requirements.txt"),
        ("tensorflow_datasets", "requirements.txt"),
        ("matplotlib", "requirements/lab.txt"),
        ("ctranslate2", "requirements/bench.txt"),
        ("unheard_of", "requirements.txt"),
    ],
)
def test_a_library_is_installed_from_the_file_that_has_it(library: str, file: str) -> None:
    assert extras.requirements_of(library) == file


def test_an_extra_is_installed_by_a_command_that_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pipejax is on no package index: clones install the extra, and installed wheels install its libraries by name."""
    assert extras.command("ray") == f"pip install -e '{ROOT}[ray]'"
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    asked = ["jax>=0.10", "pyarrow>=15; extra == 'parquet'", 'pipejax[parquet]; extra == "ray"']
    asked += ['ray[data]>=2.60; extra == "ray"', 'nltk>=3.9; extra == "metrics"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: asked)
    assert extras.command("ray") == "pip install 'pyarrow>=15' 'ray[data]>=2.60'"
    assert extras.command("metrics") == "pip install 'nltk>=3.9'"


def test_no_page_installs_an_extra_from_an_index() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert not [page.name for page in pages if "install 'pipejax[" in page.read_text()]


# Progress and interruptions.


@pytest.mark.parametrize("rows, columns", [(0, 0), (0, 40), (24, 0), (24, 40)])
def test_a_terminal_without_a_size_shows_progress(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        progress = Progress("decoding", 4, unit="example")
        progress.add(1)
        progress.bar.refresh()
        progress.close()
        terminal.flush()
        shown = ""
        while select.select([ours], [], [], 0.2)[0]:
            shown += os.read(ours, 2**16).decode()
    os.close(ours)
    assert "decoding:" in shown and "1/4" in shown
    assert max(map(len, shown.split("\r"))) <= (columns or 80)


def test_second_interrupt_reports_that_nothing_was_saved(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipejax")
    stop = Stop()
    try:
        assert not stop.asked() and not caplog.records
        signal.raise_signal(signal.SIGINT)
        assert stop.asked() and stop.asked()
        (told,) = caplog.records
        assert told.getMessage() == (
            "SIGINT: stopping here, after a checkpoint if there are new steps; a second signal ends the run at once"
        )
        with pytest.raises(KeyboardInterrupt) as ended:
            signal.raise_signal(signal.SIGINT)
    finally:
        stop.close()
    assert cli.explain(ended.value, debug=False) == cli.EXIT_INTERRUPTED
    said = "interrupted again: ended without a checkpoint; the same command resumes from the last one"
    assert capsys.readouterr().err.strip() == said
    cli.explain(KeyboardInterrupt(), debug=False)
    assert capsys.readouterr().err.strip() == "interrupted"


@pytest.mark.parametrize("flags, reason", [(os.ST_RDONLY, errno.EROFS), (0, errno.EACCES)])
def test_read_only_disk_is_named_in_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, reason: int
) -> None:
    """The path is a directory, an existing file, or the target of a link."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: type("Disk", (), {"f_flag": flags}))
    (tmp_path / "old.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "absent.jsonl")
    for name in ("new.jsonl", "old.jsonl", "link.jsonl"):
        with pytest.raises(UserError, match=f"cannot be written .{os.strerror(reason)}"):
            cli.check_output_file("--output", str(tmp_path / name))
