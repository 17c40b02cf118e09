"""Files without permission and names that are too long are refused in one line, and existing files are not changed.

Root may read and write everything. So as root, the tests of permissions run in a process without root's capabilities.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.faults import permissions, runs
from lab.faults.disks import snapshot
from pipejax.data import tokenizer
from pipejax.system import cli
from pipejax.system.errors import UserError

ROOT = Path(__file__).parents[2]
CAPABILITIES = next(
    (int(line.split()[1], 16) for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line), 0
)
PRIVILEGED = os.geteuid() == 0 and CAPABILITIES != 0
needs_permission = pytest.mark.skipif(
    PRIVILEGED, reason="root may do everything: see test_all_tests_pass_without_privilege"
)
KINDS = [kind for kind in permissions.KINDS if kind.words != ("ermission denied",) or kind.deny == permissions.DENIED]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    here = tmp_path_factory.mktemp("template")
    runs.prepare(here)
    (here / "in.jsonl").write_text('{"source": "honey maps"}\n')
    (here / "out.jsonl").write_text("precious\n")
    (here / "hf").mkdir()
    return here


@pytest.mark.parametrize("kind", [pytest.param(k, marks=needs_permission if k.deny else (), id=k.name) for k in KINDS])
def test_inaccessible_path_is_refused(kind, template, tmp_path, capsys):
    for path in template.iterdir():
        (tmp_path / path.name).symlink_to(path)
    kind.spoil(tmp_path)
    before, denied = snapshot(tmp_path), tmp_path / kind.deny
    if kind.deny:
        denied.chmod(0)
    try:
        with pytest.raises(SystemExit) as caught:
            arguments = [argument.replace("{here}", str(tmp_path)) for argument in kind.arguments]
            cli.run(importlib.import_module(kind.command).main, arguments)
    finally:
        denied.chmod(0o700)
    said = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and said[-1].startswith("error: ") and len(said[-1]) < 1100, said
    assert all(word in said[-1] for word in kind.words) and "Traceback" not in "".join(said)
    after = snapshot(tmp_path)
    assert {path: after.get(path) for path in before} == before


@needs_permission
def test_unreadable_tokenizer_file_is_refused(template, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((template / "tokenizer/tokenizer.json").read_bytes())
    (tmp_path / "tokenizer.json").chmod(0)
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read \(Permission denied\)"):
        tokenizer.digests(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not PRIVILEGED, reason="these tests ran without privilege")
def test_all_tests_pass_without_privilege():
    program = "import sys, pytest; from tests.support.unprivileged import drop; drop(); sys.exit(pytest.main())"
    flags = ["-q", "-p", "no:cacheprovider", "-rs", __file__]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    program = program.replace("pytest.main()", f"pytest.main({flags!r})")
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert f"{len(KINDS) + 1} passed, 1 skipped" in ended.stdout
