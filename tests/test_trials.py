"""Trials of kernels: verdicts on disk; child processes that crash, hang or have no GPU; and `pipejax trials`.

No test needs a GPU: the machine's GPUs are faked, and functions of `support.kernel_trials` replace the kernels.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipejax import registry
from pipejax.__main__ import main
from pipejax.inference import loading
from pipejax.kernels import block_attention, child_trials, cpu_kernel, gpu
from pipejax.kernels.backends import try_kernels
from pipejax.kernels.child_trials import OWN, XLA
from pipejax.system import compile_cache, environment, trials
from pipejax.system.errors import UserError
from pipejax.system.trials import Gpus, Trial, Verdict
from pipejax.training import loop

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = "support.kernel_trials"
CHOICES = "left", "right"
LEFT = Verdict("left", "it is faster")


@pytest.fixture
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of verdicts, on a machine with an H200."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv(compile_cache.VARIABLE, str(cache))
    monkeypatch.setattr(trials, "gpus", lambda: Gpus(("NVIDIA H200",), "575.57.08"))
    for cached in (child_trials.refusal, trials._warn_once, compile_cache._say_once):
        cached.cache_clear()
    return cache / "verdicts"


def never() -> Verdict:
    raise AssertionError("a second trial")


def test_a_later_process_reads_the_verdict(verdicts: Path) -> None:
    assert Trial("a way", "sizes").verdict(CHOICES, lambda: LEFT) == LEFT
    assert Trial("a way", "sizes").verdict(CHOICES, never) == LEFT
    assert Trial("a way", "other sizes").kept(CHOICES) is None
    assert Trial("another way", "sizes").kept(CHOICES) is None
    assert [path.name.rpartition("-")[0] for path in verdicts.iterdir()] == ["a-way"]
    assert verdicts.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(trials, "gpus", lambda: Gpus(("NVIDIA H200",), "580.95.05")),
        lambda patch: patch.setattr(trials, "gpus", lambda: Gpus(("NVIDIA L4",), "575.57.08")),
        lambda patch: patch.setattr(trials, "_libraries", lambda: {"jax": "9.9"}),
        lambda patch: patch.setattr(trials, "_sources", lambda: "a changed kernel"),
        lambda patch: patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_dump_hlo_as_text=false"),
    ],
    ids=["driver", "GPU", "JAX", "sources", "flags"],
)
def test_a_verdict_belongs_to_one_machine_and_version(
    change: Callable[[pytest.MonkeyPatch], None], verdicts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial("a way", "sizes")
    trial.verdict(CHOICES, lambda: LEFT)
    with monkeypatch.context() as patch:
        change(patch)
        assert trial.verdict(CHOICES, lambda: Verdict("right", "")).choice == "right"
    assert trial.verdict(CHOICES, never) == LEFT


def test_processes_with_gpus_of_one_kind_share_the_verdict(verdicts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers with one GPU each share the verdict, unless the GPUs differ."""
    for names, shared in ((("A", "A"), True), (("A", "B"), False)):
        monkeypatch.setattr(trials, "gpus", lambda names=names: Gpus(names, "575"))
        found = []
        for visible in ("0", "1"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            found.append(trials.machine())
        assert (found[0] == found[1]) == shared


def test_sources_of_the_programs_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "kernels" / "gpu.py"
    module.parent.mkdir()
    monkeypatch.setattr(trials, "PACKAGE", tmp_path)
    found = set()
    for text in ("a = 1", "a = 2"):
        module.write_text(text)
        trials._sources.cache_clear()
        found.add(trials._sources())
    trials._sources.cache_clear()
    assert len(found) == 2


def changed(**values: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | values)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: "[" * 100_000,
        lambda text: "\udcff" * 9,
        changed(choice="right"),
        changed(reason="it is slower"),
        changed(facts={}),
        changed(digest=7),
    ],
)
def test_a_damaged_verdict_is_reported_and_replaced(
    damage: Callable[[str], str], verdicts: Path, said: list[str]
) -> None:
    trial = Trial("a way", "sizes")
    trial.verdict(CHOICES, lambda: LEFT)
    [path] = verdicts.iterdir()
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogateescape"))
    assert trial.verdict(CHOICES, lambda: Verdict("right", "now")) == Verdict("right", "now")
    [line] = said
    assert line.startswith(f"warning: {path}: not a verdict of a trial (") and line.endswith("); the trial is repeated")
    assert trial.verdict(CHOICES, never).choice == "right" and [*verdicts.iterdir()] == [path]


def test_a_choice_that_no_longer_exists_is_tried_again(verdicts: Path, said: list[str]) -> None:
    trial = Trial("a way", "sizes")
    trial.verdict(CHOICES, lambda: LEFT)
    assert trial.verdict(["right"], lambda: Verdict("right", "")).choice == "right"
    assert "it belongs to another trial" in said[0]


def test_temporary_verdicts_are_not_stored(verdicts: Path) -> None:
    trial = Trial("a way", "sizes")
    for choice in CHOICES:
        assert trial.verdict(CHOICES, partial(Verdict, choice, "", lasts=False)).choice == choice
    assert not verdicts.exists()


@pytest.mark.parametrize("why", ["off", "no driver", "a file in the way"])
def test_each_process_tries_without_a_cache(
    why: str, verdicts: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    if why == "off":
        monkeypatch.setenv(compile_cache.VARIABLE, "off")
    elif why == "no driver":
        monkeypatch.setattr(trials, "gpus", Gpus)
    else:
        verdicts.write_text("")
    trial = Trial("a way", "sizes")
    for choice in CHOICES:
        assert trial.verdict(CHOICES, partial(Verdict, choice, "")).choice == choice
    lines = [line for line in said if "verdicts of trials are not kept" in line]
    assert len(lines) == (why != "off")


def test_simultaneous_verdicts_do_not_wait_or_damage_the_file(verdicts: Path) -> None:
    script = """
import logging, sys
from pipejax.system import trials
from pipejax.system.trials import Gpus, Trial, Verdict
trials.gpus = lambda: Gpus(("NVIDIA H200",), "575.57.08")
logging.getLogger("pipejax").addHandler(logging.StreamHandler(sys.stdout))
trial, own = Trial("a way", "sizes"), sys.argv[1]
for round in range(40):
    found = trial.verdict(("0", "1", "2"), lambda: Verdict(own, "reason" * 999))
    assert len(found.reason) == 5994
    trial._keep(Verdict(own, "reason" * 999))
"""
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(i)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == [""] * 3
    assert [process.returncode for process in started] == [0] * 3
    assert len([*verdicts.iterdir()]) == 1
    assert Trial("a way", "sizes").kept(("0", "1", "2"))


def in_child(name: str, *numbers: int, seconds: float = 60) -> Verdict:
    return child_trials.run_in_child(f"{SUPPORT}:{name}", numbers, seconds)


@pytest.fixture
def support(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets child processes import `support.kernel_trials`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


def test_a_child_reports_its_result(support: None) -> None:
    """It reserves no memory of the GPU, and only the trial imports JAX."""
    assert in_child("agree", 1) == (OWN, "results agree with XLA's", True)
    assert in_child("describe", 64, True) == (XLA, "(64, True) false False", True)


@pytest.mark.parametrize(
    "name, number, reason, lasts",
    [
        ("end_by", signal.SIGSEGV, "the process of their trial ended by SIGSEGV", True),
        ("end_by", signal.SIGABRT, "the process of their trial ended by SIGABRT", True),
        ("end_by", signal.SIGKILL, "the process of their trial ended by SIGKILL", False),
        ("exit_at_once", 3, "the process of their trial failed (exit code 3)", False),
        ("fail", False, "cannot lower", True),
        ("fail", True, "RESOURCE_EXHAUSTED: out of memory", False),
    ],
)
def test_failed_child_process_gives_xla_and_a_reason(
    name: str, number: int, reason: str, lasts: bool, support: None
) -> None:
    assert in_child(name, int(number)) == (XLA, reason, lasts)


@pytest.mark.slow
def test_hanging_child_is_ended(support: None) -> None:
    assert in_child("hang", 999, seconds=3) == (XLA, "their trial took more than 3 s", True)


def test_process_that_cannot_start_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = in_child("agree")
    assert found == (XLA, "the process of their trial could not be started (No such file or directory)", False)


@pytest.mark.slow
def test_a_second_process_without_the_gpu_uses_xla(support: None, verdicts: Path) -> None:
    """A GPU may be used by one process only. Then no verdict is stored, and the next process tries again."""
    assert child_trials.refusal("kernels", f"{SUPPORT}:without_gpu") == "a second process cannot use the GPU"
    assert not verdicts.exists()


def test_result_of_a_trial_in_a_child_process_is_stored(support: None, verdicts: Path, said: list[str]) -> None:
    for _ in range(2):
        child_trials.refusal.cache_clear()
        assert child_trials.refusal("kernels", f"{SUPPORT}:describe", 7).startswith("(7,)")
    assert len(said) == 1 and said[0].startswith("trying pipejax's kernels in a separate process, once for this GPU")


def test_kernels_are_tried_before_the_gpu_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading a checkpoint and training begin with the trials, if the machine has a GPU."""
    asked: list[bool] = []
    monkeypatch.setattr(
        registry, "find", lambda place: {registry.TRY_KERNELS: lambda trains: asked.append(trains)}[place]
    )
    trials.try_kernels_early(trains=True)  # tests have no GPU
    monkeypatch.setattr(trials, "gpus", lambda: Gpus(("NVIDIA H200",), "575"))
    trials.try_kernels_early(trains=True)  # JAX_PLATFORMS=cpu
    assert asked == []
    with monkeypatch.context() as patch:
        patch.setattr(trials, "_platforms", lambda: "cuda,cpu")
        trials.try_kernels_early(trains=True)
    assert asked == [True]

    class Tried(Exception):
        pass

    def stop(*, trains: bool) -> None:
        asked.append(trains)
        raise Tried

    monkeypatch.setattr(trials, "try_kernels_early", stop)
    monkeypatch.setattr(environment, "check_environment", lambda: pytest.fail("the GPU is used"))
    with pytest.raises(UserError, match="no such"):
        loading.load(tmp_path / "missing")
    with pytest.raises(Tried):
        loading.load(tmp_path)
    for name in ("require_method", "methods.check_training"):
        monkeypatch.setattr(f"pipejax.training.loop.{name}", lambda config: None)
    config: Any = None
    with pytest.raises(Tried):
        loop.fit(config, tmp_path)
    assert asked == [True, False, True]


def test_all_kernels_have_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def refusal(name: str, *given: Any) -> str:
        asked.append(given)
        return ""

    monkeypatch.setattr(child_trials, "refusal", refusal)
    try_kernels(trains=True)
    places = {f"{module.__name__}:disagreement" for module in (block_attention, gpu)}
    assert {place for place, *_ in asked} == places and (f"{block_attention.__name__}:disagreement", 64, True) in asked
    for place in places:
        assert callable(registry.find(place))
    monkeypatch.setenv(cpu_kernel.VARIABLE, "off")
    asked.clear()
    try_kernels(trains=True)
    assert asked == []


def test_the_command_lists_and_removes(verdicts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trials"]) == 0 and capsys.readouterr().out == ""
    Trial("a way", "sizes").verdict(CHOICES, lambda: LEFT)
    (verdicts / "z.json").write_text("{")
    assert main(["trials"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("a way: left (it is faster) on NVIDIA H200, driver 575.57.08")
    assert second.startswith(f"{verdicts / 'z.json'}: not a verdict")
    assert main(["trials", "--remove"]) == 0 and capsys.readouterr().out == "2 removed\n"
    assert [*verdicts.iterdir()] == []
    assert Trial("a way", "sizes").kept(CHOICES) is None
