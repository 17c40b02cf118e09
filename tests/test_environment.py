"""Environment variables of JAX: settings that affect results are ignored, and invalid ones are refused in a line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pipejax.system import environment
from pipejax.system.errors import UserError

ROOT = Path(__file__).parents[1]
OTHERS = {
    "JAX_ENABLE_X64": "1",
    "JAX_DISABLE_JIT": "true",
    "JAX_DEBUG_NANS": "1",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_RANDOM_SEED_OFFSET": "7",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
}
DRAW = (
    "import json, jax; from pipejax.system import environment; x = jax.random.normal(jax.random.key(3), (4,)) + 1;"
    "print(json.dumps([environment.settings(), str(x.dtype), x.tolist()]))"
)


def python(text, **variables):
    return subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_every_pinned_setting_is_one_of_jax_and_its_default():
    assert {name.upper() for name in environment.PINNED} == OTHERS.keys()
    found = environment.settings()
    assert {name: found[name] for name in environment.PINNED} == environment.PINNED
    assert "jax_default_matmul_precision" in found


@pytest.mark.slow
def test_shell_variables_do_not_change_random_numbers():
    """The numbers are the same as without the variables."""
    plain = python("import pipejax; " + DRAW)
    assert plain.returncode == 0, plain.stderr
    drawn = json.loads(plain.stdout)
    assert drawn[1] == "float32" and drawn[2] == (jax.random.normal(jax.random.key(3), (4,)) + 1).tolist()
    set_otherwise = python("import pipejax; " + DRAW, **OTHERS)
    assert json.loads(set_otherwise.stdout) == drawn, set_otherwise.stderr
    unreadable = python("import pipejax; " + DRAW, JAX_ENABLE_X64="perhaps", JAX_DEFAULT_PRNG_IMPL="nonsense")
    assert json.loads(unreadable.stdout) == drawn, unreadable.stderr


def test_commands_report_ignored_variables():
    text = "from pipejax.system import cli; cli.run(lambda argv: 0)"
    assert python(text, JAX_ENABLE_X64="Off", JAX_THREEFRY_PARTITIONABLE="yes").stderr == ""
    said = python(text, JAX_ENABLE_X64="1").stderr
    assert said == "JAX_ENABLE_X64=1: ignored, because it would change results\n"


def test_program_gets_a_warning(tmp_path):
    text = f"import pipejax\ntry: pipejax.load({str(tmp_path)!r})\nexcept pipejax.system.errors.UserError: pass"
    said = python("import pipejax.system.errors; " + text, JAX_ENABLE_X64="1").stderr
    assert "UserWarning: JAX_ENABLE_X64=1: ignored" in said


def test_program_that_changed_the_setting_is_refused(monkeypatch):
    environment.check_environment()
    with jax.numpy_dtype_promotion("strict"), pytest.raises(UserError, match=r"^jax_numpy_dtype_promotion: found"):
        environment.check_environment()
    monkeypatch.setitem(environment.PINNED, "jax_enable_x64", True)
    with pytest.raises(UserError, match=r"^jax_enable_x64: found False, from jax.config or from JAX_ENABLE_X64 before"):
        environment.check_environment()


@pytest.mark.parametrize("flags", ["--xla_nonsense=1", "--xla_backend_optimization_level=x", "nonsense"])
def test_flags_that_would_end_the_process_are_refused(flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(UserError) as caught:
        environment.check_flags()
    assert str(caught.value).startswith(f"XLA_FLAGS: found {flags!r} (") and "\n" not in str(caught.value)


def test_valid_flags_are_not_reported():
    ended = python(
        "from pipejax.system import cli; cli.run(lambda argv: 0)", XLA_FLAGS="--xla_cpu_enable_fast_math=false"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    ended = python("from pipejax.system import cli; cli.run(lambda argv: 0)", XLA_FLAGS="--xla_nonsense")
    assert ended.returncode == 2 and ended.stderr.startswith("error: XLA_FLAGS: found '--xla_nonsense' (")


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_absent_platform_is_refused(platform):
    if platform == "cuda" and any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    ended = python("import jax, pipejax; pipejax.system.environment.check_environment()", JAX_PLATFORMS=platform)
    assert ended.stderr.splitlines()[-1].startswith(
        f"pipejax.system.errors.UserError: JAX_PLATFORMS: found '{platform}' ("
    )
