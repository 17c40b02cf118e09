"""Tests settings of JAX and XLA in the shell: they must not change a run, or they are refused in one line."""

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.faults import refusals, runs
from lab.faults.runs import Commands

ROOT = Path(__file__).parents[2]
PINNED: tuple[Mapping[str, str], ...] = (
    {"JAX_ENABLE_X64": "1"},
    {"JAX_ENABLE_X64": "perhaps"},  # with this value, importing JAX would fail
    {"JAX_DISABLE_JIT": "1"},
    {"JAX_DEBUG_NANS": "1"},
    {"JAX_THREEFRY_PARTITIONABLE": "0"},
    {"JAX_DEFAULT_PRNG_IMPL": "rbg"},
    {"JAX_RANDOM_SEED_OFFSET": "7"},
    {"JAX_NUMPY_DTYPE_PROMOTION": "strict"},
    {"JAX_NUMPY_RANK_PROMOTION": "raise"},
)
REFUSED: tuple[tuple[Mapping[str, str], str], ...] = (
    ({"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS: found 'cuda'"),
    ({"JAX_PLATFORMS": "cpuu"}, "JAX_PLATFORMS: found 'cpuu'"),
    ({"XLA_FLAGS": "--xla_nonsense=1"}, "XLA_FLAGS: found '--xla_nonsense=1' (Unknown flag"),
    ({"XLA_FLAGS": "--xla_backend_optimization_level=x"}, "XLA_FLAGS: found"),
    ({"XLA_FLAGS": "nonsense"}, "XLA_FLAGS: found"),
)
LOAD = "import pipejax; g = pipejax.load(sys.argv[1]); print(g.decode(['honey maps'])[0]['text'])"
PROGRAMS: tuple[
    tuple[str, dict[str, str], str, str], ...
] = (  # and the word that the UserError must contain; "": the program works
    ("imported first", {"JAX_ENABLE_X64": "1"}, f"import sys; {LOAD}", ""),
    ("JAX first", {"JAX_ENABLE_X64": "1"}, f"import sys, jax; {LOAD}", "jax_enable_x64: found True"),
    ("set before", {}, f"import sys, jax; jax.config.update('jax_enable_x64', True); {LOAD}", "jax_enable_x64"),
    ("no such device", {"JAX_PLATFORMS": "cuda"}, f"import sys; {LOAD}", "JAX_PLATFORMS"),
)


def many(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Checks that trainings with pinned settings have equal bits, and that other settings are refused in one line."""
    here = refusals.template(commands, scratch / "template")
    plain = _train(here, scratch / "plain", {})
    reference = plain["word"]
    with ThreadPoolExecutor(2) as pool:
        pinned = list(pool.map(lambda n: _train(here, scratch / f"pinned-{n[0]}", n[1]), enumerate(PINNED)))
        refused = list(pool.map(lambda case: _refused(here, scratch, *case), REFUSED))
        programs = list(pool.map(lambda case: _program(here, *case), PROGRAMS))
    for result in pinned:
        result["ok"] = result["code"] == 0 and result["word"] == reference and ": ignored" in result["said"]
    bad = [result for result in (*pinned, *refused, *programs) if not result["ok"]]
    return {
        "pinned": len(pinned),
        "the_same_run": sum(result["ok"] for result in pinned),
        "refused_in_one_line": f"{sum(result['ok'] for result in refused)} of {len(refused)}",
        "python_programs": f"{sum(result['ok'] for result in programs)} of {len(programs)}",
        "ok": not bad and plain["code"] == 0,
        "failures": bad[:10],
    }


def _run(arguments: list[str], settings: Mapping[str, str]) -> tuple[int, list[str]]:
    shell = {**os.environ, "PIPEJAX_CACHE": "off", **settings}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=shell, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    return ended.returncode, ended.stderr.splitlines()


def _train(here: Path, workdir: Path, settings: Mapping[str, str]) -> dict[str, Any]:
    flags = [f"--config={here / 'config.py'}", f"--workdir={workdir}", "--set=train.steps=2", "--set=data.dev="]
    code, said = _run(["train.py", *flags], settings)
    word = runs.state_word(workdir, 2) if code == 0 else ""
    return {"settings": dict(settings), "code": code, "said": " / ".join(said)[:600], "word": word}


def _refused(here: Path, scratch: Path, settings: Mapping[str, str], words: str) -> dict[str, Any]:
    target = scratch / "nothing"
    code, said = _run(["train.py", f"--config={here / 'config.py'}", f"--workdir={target}"], settings)
    good = code == 2 and len(said) == 1 and words in said[0] and not (target / "checkpoints").exists()
    return {"settings": dict(settings), "code": code, "said": " / ".join(said)[:600], "ok": good}


def _program(here: Path, name: str, settings: Mapping[str, str], text: str, words: str) -> dict[str, Any]:
    code, said = _run(["-c", text, str(here / "run")], settings)
    last = said[-1] if said else ""
    good = (
        code == 0 if not words else code == 1 and last.startswith("pipejax.system.errors.UserError") and words in last
    )
    return {"program": name, "code": code, "said": last[:600], "ok": good}
