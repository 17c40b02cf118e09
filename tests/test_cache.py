"""The directory of compiled programs: its permitted owners, and the messages if it is not used."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipejax.convert import converted
from pipejax.kernels import cpu_kernel
from pipejax.system import compile_cache
from pipejax.system.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
STRANGER = 4242  # the id of a user that does not exist
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
# Compiles a program; prints the state of the cache.
CHILD = """
import json, logging, os, sys
import filelock, jax, jax.numpy as jnp
from jax._src import compilation_cache
from pipejax.system import compile_cache
jax.jit(jnp.sin)(jnp.ones(3)).block_until_ready()  # imports what another user may not be able to read
compilation_cache.reset_cache()
if len(sys.argv) > 1:
    os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
hits, said = [], []
jax.monitoring.register_event_listener(lambda name, **kw: hits.append(name) if name.endswith("/cache_hits") else None)
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("pipejax").addHandler(handler)
path = compile_cache.use_cache()
def f(x):
    for i in range(300):
        x = jnp.sin(x) * i + jnp.cos(x)
    return x
jax.jit(f)(jnp.ones(7)).block_until_ready()
if len(sys.argv) > 2:
    jax.jit(lambda x: f(x) + 1)(jnp.ones(7)).block_until_ready()
print(json.dumps([str(path), len(hits), said]))
"""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines of the log."""
    found = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipejax").addHandler(handler)
    compile_cache._say_once.cache_clear()
    yield found
    logging.getLogger("pipejax").removeHandler(handler)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    place.mkdir(mode=0o755)
    monkeypatch.setenv(compile_cache.VARIABLE, str(place))
    return place


def owned_by(owner: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the directory appear to belong to a user, and this process to a third user who is not root."""
    monkeypatch.setattr(os, "getuid", lambda: STRANGER)
    before = Path.stat

    def stat(self: Path, **given: Any) -> os.stat_result:
        found = before(self, **given)
        return os.stat_result((*found[:4], owner, *found[5:])) if self.is_relative_to(path) else found

    monkeypatch.setattr(Path, "stat", stat)


def only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates missing write permission, since root may write everywhere."""
    before = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **given: not mode & os.W_OK and before(path, mode, **given))


def test_the_cache_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    owned_by(STRANGER + 1, cache, monkeypatch)
    assert compile_cache.safe_directory() is None and compile_cache.safe_directory() is None
    assert said == [
        f"compiled programs are not kept: {cache} belongs to another user (number {STRANGER + 1}); PIPEJAX_CACHE=DIR "
        "names another directory"
    ]


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_cache_of_root_with_write_access_for_others_is_not_used(
    mode: int, cache: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    cache.chmod(mode)
    owned_by(0, cache, monkeypatch)
    assert compile_cache.safe_directory() is None
    assert said == [
        f"compiled programs are not kept: {cache} is open to others, and belongs to root; PIPEJAX_CACHE=DIR names "
        "another directory"
    ]


def test_own_cache_with_write_access_for_others_recommends_chmod(cache: Path, said: list[str]) -> None:
    cache.chmod(0o775)
    assert compile_cache.safe_directory() is None
    assert f"{cache} is open to others (chmod 700 closes it); PIPEJAX_CACHE=DIR names another" in said[0]
    cache.chmod(0o700)
    assert compile_cache.safe_directory() == cache


def test_unreadable_cache_of_root_recommends_chmod(
    cache: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    owned_by(0, cache, monkeypatch)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert compile_cache.safe_directory() is None
    assert "is closed to this user (in an image, chmod -R a+rX lets every user read it); PIPEJAX_CACHE=DIR" in said[0]


def test_a_cache_of_root_is_read(cache: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    owned_by(0, cache, monkeypatch)
    only_read(monkeypatch)
    updates: dict[str, Any] = {}
    config = types.SimpleNamespace(
        values={"jax_compilation_cache_dir": None}, update=lambda key, value: updates.update({key: value})
    )
    monkeypatch.setattr(compile_cache, "jax", types.SimpleNamespace(config=config))
    assert compile_cache.use_cache() == cache
    assert updates["jax_compilation_cache_dir"] == str(cache) and updates["jax_compilation_cache_max_size"] == -1
    assert said == [
        f"{cache}: its programs are used, but this user may not add others; PIPEJAX_CACHE=DIR names a directory that "
        "keeps them"
    ]


def test_kernel_in_cache_of_root_is_loaded_without_compiling(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    compiler, runs = tmp_path / "c++", tmp_path / "runs"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\necho kernel > "$last"\necho x >> {runs}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(cpu_kernel, "_load", lambda library, level: True)
    level = cpu_kernel.LEVELS[-1:]
    assert cpu_kernel._first_compiled([*level])
    made = runs.read_text()
    owned_by(0, cache, monkeypatch)
    only_read(monkeypatch)
    assert cpu_kernel._first_compiled([*level]) and runs.read_text() == made
    (library,) = cache.glob("*.so")
    library.unlink()
    assert cpu_kernel._first_compiled([*level]) is None and runs.read_text() == made
    assert said[-1] == (
        f"decoding runs without pipejax's kernel: {cache} has no kernel for this processor, and is not writable"
    )


def test_a_conversion_is_not_written_into_a_cache_of_root(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    only_read(monkeypatch)
    monkeypatch.setattr(converted, "from_hf", lambda source, out: out.mkdir())
    with pytest.raises(UserError, match=r"found no conversion of this model in .*cache"):
        converted.find_checkpoint(tmp_path / "model")
    target = converted._place(cache, "model", str(tmp_path / "model"))
    (target / "checkpoint").mkdir(parents=True)
    assert converted.find_checkpoint(tmp_path / "model") == target / "checkpoint"


@as_root
@pytest.mark.slow
def test_cache_created_by_root_serves_another_user(tmp_path: Path) -> None:
    """Root builds an image; the cache is refused if it is writable for all or not readable for the user."""
    place = Path(tempfile.mkdtemp())  # pytest's own folder is closed to others
    try:
        place.chmod(0o755)
        cache = place / "cache"
        settings = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION")}
        settings |= {compile_cache.VARIABLE: str(cache), "HOME": str(place), "PYTHONPATH": str(ROOT)}

        def child(*arguments: str) -> list[Any]:
            done = subprocess.run(
                [sys.executable, "-c", CHILD, *arguments],
                cwd=place,
                env=settings,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            found: list[Any] = json.loads(done.stdout)
            return found

        assert child() == [str(cache), 0, []]
        path, hits, said = child(str(STRANGER))
        assert (path, hits) == ("None", 0) and "is closed to this user" in said[0]
        subprocess.run(["chmod", "-R", "a+rX", str(cache)], check=True)
        files = sorted(map(str, cache.rglob("*")))
        path, hits, said = child(str(STRANGER), "another program")
        assert path == str(cache) and hits > 0
        assert said == [
            f"{cache}: its programs are used, but this user may not add others; PIPEJAX_CACHE=DIR names a directory "
            "that keeps them"
        ]
        assert sorted(map(str, cache.rglob("*"))) == files
        cache.chmod(0o777)
        path, hits, said = child(str(STRANGER))
        assert (path, hits) == ("None", 0) and "is open to others, and belongs to root" in said[0]
    finally:
        shutil.rmtree(place)
