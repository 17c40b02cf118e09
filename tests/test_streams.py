"""Standard streams that are closed, full, or without a reader: finished work is not lost by a failed message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipejax.system import streams
from pipejax.system.errors import UserError

ROOT = Path(__file__).parents[1]
SAYS = """
import sys
from pipejax.system import cli
def main(argv):
    cli.note("a line for people")
    file = open(argv[0], "w")
    print("a result", flush="flush" in argv)
    cli.note("another line")
    file.write(f"numbered {file.fileno()}")
    return 3
cli.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirected, code, out, err",
    [
        ("", 3, "a result\n", "a line for people\nanother line\n"),
        ("2>&-", 3, "a result\n", ""),
        ("2>/dev/full", 3, "a result\n", ""),
        (">&-", 3, "", "a line for people\nanother line\n"),
        ("<&- >&- 2>&-", 3, "", ""),
        (">/dev/full", 2, "", "error: standard output: cannot be written (No space left on device)\n"),
        (">/dev/full 2>&-", 2, "", ""),
    ],
)
@pytest.mark.parametrize("flush", ["", "flush"])
def test_closed_and_full_outputs_end_the_command(redirected, code, out, err, flush, tmp_path):
    command = f'{sys.executable} -c "$SAYS" {tmp_path / "file"} {flush} {redirected}'
    ended = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "SAYS": SAYS}, check=False
    )
    assert (ended.returncode, ended.stdout) == (code, out)
    assert ended.stderr.endswith(err) and (err or not ended.stderr) and "Traceback" not in ended.stderr
    if code == 3:  # no output is written to a file that has a closed stream's number
        number = int((tmp_path / "file").read_text().removeprefix("numbered "))
        assert number > 2


def test_closed_standard_output_ends_the_command_and_closed_error_does_not(tmp_path):
    """With closed standard error the work continues; with closed standard output it ends, as for other tools."""
    loop = (
        "import sys, time\nfrom pipejax.system import cli\ndef main(argv):\n for i in range(9): SAY; time.sleep(0.02)\n"
    )
    end = f" open({str(tmp_path / 'done')!r}, 'w')\n return 0\ncli.run(main)"
    for say, code, done in (("cli.note(i)", 0, True), ("print(i, flush=True)", 1, False)):
        command = [sys.executable, "-c", loop.replace("SAY", say.replace("(i", "(str(i)")) + end]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stderr is not None
        read, kept = (process.stderr, process.stdout) if done else (process.stdout, process.stderr)
        assert read.readline() == b"0\n"
        read.close()
        assert kept.read() == b"" and process.wait(60) == code
        assert (tmp_path / "done").exists() == done
        (tmp_path / "done").unlink(missing_ok=True)
        kept.close()


def test_write_failure_is_reported_once():
    reader, writer = os.pipe()
    os.close(reader)
    result = streams._Stream(writer, "standard output")
    with pytest.raises(streams.ReaderGone):
        result.write(b"x")
    assert result.write(b"more") == 4
    assert streams._Stream(writer).write(b"for people") == 10
    os.close(writer)
    with open("/dev/full", "wb") as full:
        result = streams._Stream(full.fileno(), "standard output")
        with pytest.raises(UserError, match=r"^standard output: cannot be written \(No space left on device\)$"):
            result.write(b"x")
        assert result.write(b"more") == 4


def test_closed_output_is_refused_before_the_work(monkeypatch):
    streams.check_standard_output("--output")
    monkeypatch.setattr(streams, "_closed_at_start", ["stdout"])
    with pytest.raises(UserError, match=r"^--output -: found standard output closed"):
        streams.check_standard_output("--output")


def test_no_command_waits_for_work_that_is_not_needed():
    """Here the work never ends; the exit code is the command's, and messages are written."""
    text = """
import threading
from concurrent.futures import ThreadPoolExecutor
from pipejax.system import cli
begun = threading.Event()
def work():
    with cli.unneeded():
        begun.set()
        threading.Event().wait()
def main(argv):
    ThreadPoolExecutor().submit(work)
    begun.wait()
    print("said")
    return 143
cli.run(main)
"""
    command = [sys.executable, "-c", text]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "said\n", "")


def test_an_interrupted_command_ends_at_once():
    """A thread never ends here: a computing thread would crash when memory is freed."""
    text = """
import threading
from pipejax.system import cli
def main(argv):
    threading.Thread(target=threading.Event().wait).start()
    print("said")
    raise KeyboardInterrupt
cli.run(main)
"""
    command = [sys.executable, "-c", text]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "said\n", "interrupted\n")
