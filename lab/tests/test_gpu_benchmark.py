"""lab/benchmarks/gpu.sh: a failed part does not stop others, results are saved at once, and the tables show them."""

import dataclasses
import json
import os
import signal
import subprocess
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from lab.benchmarks import (
    agreement,
    buffers,
    decode,
    gpu,
    gpu_tables,
    graph,
    profile,
    steps,
    suite,
    systems,
    wheels,
)
from lab.benchmarks.gpu import Part
from lab.benchmarks.peers import training
from lab.benchmarks.systems import Run
from pipejax import config as config_lib
from pipejax.decoding import Sequential
from pipejax.inference.backends import Xla
from pipejax.inference.step_decoder import StepDecoder
from pipejax.model.t5 import T5
from pipejax.training.step import check_batch
from support import oracle
from support.tiny import IN_BLOCKS

ROOT = Path(gpu.__file__).resolve().parents[2]
WRITES = "import json, sys; json.dump({found}, open(sys.argv[1], 'w')); "


def part(name, seconds, code, found="None"):
    return Part(name, seconds, f"about {name}", ("-c", WRITES.format(found=found) + code, "{json}"))


def start():
    return {"rehearsal": False, "began": time.time(), "device": {}, "wheels": {"installed": [], "failures": []}}


# The runner.


@pytest.mark.slow
def test_a_broken_part_stops_no_other(tmp_path):
    """One hangs, with a child of its own; one fails; one writes nothing that can be read; each leaves what it wrote."""
    child = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    table = [
        part("hangs", 2.5, child, "[1]"),
        part("fails", 60, "sys.exit('no such luck')", "[2]"),
        Part("silent", 0, "about silent", ("-c", "import sys; open(sys.argv[1], 'w').write('[3')", "{json}")),
        part("well", 0, "print('fine')", "[4]"),
    ]
    summary = start()
    assert not gpu.run(table, tmp_path, summary, dict(os.environ))
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == summary
    records = {record["name"]: record for record in found["parts"]}
    assert {name: (r["status"], r["code"], r["results"]) for name, r in records.items()} == {
        "hangs": ("timed out", None, [1]),
        "fails": ("failed", 1, [2]),
        "silent": ("done", 0, None),
        "well": ("done", 0, [4]),
    }
    assert records["fails"]["said"] == "no such luck\n" and records["well"]["said"] == "fine\n"
    assert 50 < records["well"]["limit"] < 60 < records["fails"]["limit"] + 0.5  # what others left over
    stat = Path(f"/proc/{records['hangs']['said'].strip()}/stat")
    assert not stat.exists() or " Z " in stat.read_text()
    lines = gpu_tables.short(summary | {"device": {"kind": "NVIDIA H200"}})
    assert [line.split()[:2] for line in lines[1:]] == [
        ["hangs", "timed"],
        ["fails", "failed"],
        ["silent", "done"],
        ["well", "done"],
    ]


def test_requested_parts_share_the_total_time(capsys):
    every = gpu.parts()
    few = gpu.only(every, ["kernels", "train"])
    assert [part.name for part in few] == ["train", "kernels"]
    assert sum(part.seconds for part in few) == pytest.approx(sum(part.seconds for part in every))
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--parts", "kernels,trian"])
    assert ended.value.code == 2
    assert "found 'trian'; expected some of train, train-peers," in capsys.readouterr().err


def test_results_so_far_survive_the_end_of_the_process(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGTERM, gpu.interrupted)
    try:
        ends = part("ends", 60, "import os, time; os.kill(os.getppid(), 15); time.sleep(60)", "[2]")
        with pytest.raises(KeyboardInterrupt):
            gpu.run([part("well", 60, "", "[1]"), ends, part("never", 60, "")], tmp_path, start(), dict(os.environ))
    finally:
        signal.signal(signal.SIGTERM, before)
    found = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert [(r["name"], r["status"], r.get("results")) for r in found] == [
        ("well", "done", [1]),
        ("ends", "cut off", None),
    ]
    assert json.loads((tmp_path / "ends.json").read_text()) == [2]


def test_there_must_be_a_gpu_or_a_rehearsal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "environment", lambda site, rehearse: ({}, {"installed": [], "failures": ["no wheels"]}))
    monkeypatch.setattr(gpu, "look", lambda variables: {"platform": "cpu", "kind": "cpu"})
    monkeypatch.setattr(gpu, "parts", lambda **options: [part("kernels", 60, "sys.exit(3)")])
    assert gpu.main([str(tmp_path / "a")]) == 2
    assert "found no GPU (JAX on cpu)" in capsys.readouterr().err
    before = signal.getsignal(signal.SIGTERM)
    assert gpu.main([str(tmp_path / "a"), "--rehearse"]) == 1
    signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr().out
    assert said.startswith("A rehearsal") and "not installed: no wheels" in said and "about kernels: failed" in said


def test_programs_accept_all_flags_in_the_table(monkeypatch):
    """On a GPU there is no time for a flag that is spelt wrong. Each program stops where its work begins."""

    class Begun(BaseException):
        pass

    def begin(*given, **options):
        raise Begun

    mains = {"agreement": agreement.main, "decode": decode.main, "steps": steps.main, "suite": suite.main}
    mains |= {"peers.training": training.main, "profile": profile.main, "graph": graph.main}
    monkeypatch.setattr(training, "measured", begin)
    monkeypatch.setattr(profile, "look", begin)
    monkeypatch.setattr(graph, "random_params", begin)
    monkeypatch.setattr(agreement, "trial", begin)
    monkeypatch.setattr(decode, "random_params", begin)
    monkeypatch.setattr(decode, "use_threads", lambda count: None)
    monkeypatch.setattr(pytest, "main", begin)
    monkeypatch.setattr(steps, "measured", begin)
    for rehearse in (False, True):
        table = gpu.parts(rehearse=rehearse, threads=16)
        assert sum(part.seconds for part in table) == (960 if rehearse else 480)
        assert len({part.name for part in table}) == len(table) == len(gpu_tables.TABLES)
        for each in table:
            assert each.name in gpu_tables.TABLES and each.command[0] == "-m"
            module, arguments = each.command[1].removeprefix("lab.benchmarks."), list(each.command[2:])
            assert arguments[arguments.index("--json") + 1] == "{json}"
            if module == "buffers":
                module, arguments = "decode", arguments[arguments.index("--") + 1 :]
            with monkeypatch.context() as patch, pytest.raises(Begun):
                patch.setattr(os, "environ", os.environ.copy())
                mains[module]([x.replace("{json}", "out.json") for x in arguments])


@pytest.mark.parametrize("arguments", [[], ["there"], ["--rehearse", "there"]])
def test_the_script_hands_its_arguments_on(arguments):
    done = subprocess.run(
        [ROOT / "lab" / "benchmarks" / "gpu.sh", *arguments],
        env=os.environ | {"PYTHON": "echo"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["-m", "lab.benchmarks.gpu", *arguments]


# The wheels.


def wheel(directory, name, needs=""):
    label = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "here = True\n")
        file.writestr(f"{label}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        file.writestr(f"{label}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{label}/RECORD", f"{name}.py,,\n{label}/METADATA,,\n{label}/WHEEL,,\n{label}/RECORD,,\n")


@pytest.mark.slow
def test_only_missing_wheels_are_installed(tmp_path):
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "pipejax_lacks_this", "Requires-Dist: numpy\nRequires-Dist: pipejax-lacks-that\n")
    wheel(tmp_path / "wheels", "pipejax_lacks_that")
    wheel(tmp_path / "wheels", "numpy")
    site, names = tmp_path / "site", ("pipejax-lacks-this", "pipejax-knows-not")
    found = wheels.install(tmp_path / "wheels", site, names=names)
    assert found["installed"] == ["pipejax_lacks_that", "pipejax_lacks_this"]
    assert len(found["failures"]) == 1 and found["failures"][0].startswith("pipejax-knows-not: ")
    assert sorted(path.name for path in site.glob("*.py")) == ["pipejax_lacks_that.py", "pipejax_lacks_this.py"]
    found = wheels.install(tmp_path / "absent", site)
    assert found["installed"] == [] and "make gpu-wheels" in found["failures"][0] and not any(site.iterdir())


def test_every_wheel_has_a_version() -> None:
    assert wheels.pins().keys() >= {*wheels.NAMES}


# What is measured.


def test_a_system_that_fails_is_left_out():
    class Fake:
        def __init__(self, name, lasts):
            self.name, self.lasts = name, lasts

        def run(self, source, rows):
            self.lasts -= 1
            if self.lasts < 0:
                raise MemoryError("no\nroom")
            return Run(1.0, 2.0)

    every, failures = [Fake("a", 9), Fake("b", 1)], {}
    found = systems.interleaved(every, np.zeros((1, 1)), [[1]], 2, lambda: None, failures)
    assert found == {"a": [Run(1.0, 2.0)] * 2} and failures == {"b": "MemoryError: no room"}
    with pytest.raises(MemoryError):
        systems.interleaved([Fake("a", 0)], np.zeros((1, 1)), [[1]], 2, lambda: None)


@pytest.mark.parametrize("taken, code", [(lambda flags: "+WHILE" not in flags, 0), (lambda flags: not flags, 1)])
def test_first_accepted_spelling_of_a_flag_is_measured(taken, code, tmp_path, monkeypatch):
    seen = []

    def measured(flags, arguments):
        seen.append(flags)
        assert arguments == ["--model", "tiny"]
        return ("", [{"system": "a", "steps": 2}]) if taken(flags) else ("error: unknown flag", [])

    monkeypatch.setattr(buffers, "measured", measured)
    assert buffers.main(["--json", str(tmp_path / "out.json"), "--", "--model", "tiny"]) == code
    found = json.loads((tmp_path / "out.json").read_text())
    assert [t["flags"] for t in found["tried"]] == seen and seen[
        0
    ] == "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
    assert {r["setting"] for r in found["results"]} == ({"kernels"} if code else {*buffers.SETTINGS})
    assert len(seen) == (5 if code else 4)


@pytest.mark.slow
def test_xla_refuses_unknown_flags() -> None:
    said, results = buffers.measured("--xla_gpu_enable_command_buffer=+NONSENSE", ["--model", "tiny"])
    assert said.startswith("error: XLA_FLAGS") and results == []


@dataclasses.dataclass(frozen=True)
class Wrong(Xla):
    """Another epsilon in every norm."""

    def decoder(self, model, weights, memory):
        return StepDecoder(dataclasses.replace(model.config, layer_norm_epsilon=0.5), weights, memory, model.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("backend, agrees", [(Xla(), True), (Wrong(), False)], ids=["right", "wrong"])
def test_wrong_kernels_are_found(backend, agrees):
    params = jax.tree.map(jax.numpy.asarray, oracle.random_params(IN_BLOCKS, np.random.default_rng(0)))
    four = agreement.Four(IN_BLOCKS, params, backend)
    source, strategy = [[5, 6, 7, 1]] * 2, Sequential(12)
    for dtype in agreement.DTYPES:
        found = four.outputs(dtype, source, strategy, 1e-3)
        assert found["agrees"] == agrees
    assert (found["apart"] == 0) == agrees  # the last is float32
    assert four.tokens("float32", source, strategy)["equal"] <= 1


@pytest.mark.parametrize("broken, code", [("float32", 0), ("bfloat16", 1)])
def test_kernels_that_decoding_does_not_use_need_not_fit(broken, code, tmp_path, monkeypatch):
    def compared(self, dtype, *given):
        if dtype == broken:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return {"agrees": True}

    monkeypatch.setattr(agreement.compile_cache, "use_cache", lambda: None)
    monkeypatch.setattr(agreement, "trial", lambda queries, interpret: {"agrees": True, "apart": 0.0})
    monkeypatch.setattr(agreement.Four, "__init__", lambda self, *given: None)
    monkeypatch.setattr(agreement.Four, "outputs", compared)
    monkeypatch.setattr(agreement.Four, "tokens", compared)
    assert agreement.main(["--model", "tiny", "--json", str(tmp_path / "out.json")]) == code
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["agrees"] == (not code)
    assert {r["agrees"] for r in found["results"] if "error" in r} == {False if code else None}
    assert len(found["results"]) == 3 + 2 * 2 * 2 * 2


@pytest.mark.long
def test_a_training_step_is_measured_beside_its_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steps.costs, "peak", lambda device: 1e12)
    settings = [
        "train.batch_size=2",
        "train.accumulate=1",
        "train.remat=none",
        "data.max_source=16",
        "data.max_target=8",
    ]
    flags = [x for setting in settings for x in ("--set", setting)] + ["--steps", "2", "--models", "base,tiny"]
    real = steps.measured

    def measured(config, count, **options):
        if config.model.d_model > 100:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return real(config, count, **options)

    monkeypatch.setattr(steps, "measured", measured)
    config = str(ROOT / "configs" / "jsonl.py")
    assert steps.main(["--config", config, *flags, "--json", str(tmp_path / "out.json")]) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    where = {"system": "pipejax", "model": "base", "source": 16}
    assert found["failures"] == [{**where, "error": "RuntimeError: RESOURCE_EXHAUSTED"}]
    (result,) = found["results"]
    flops = systems.SIZES["tiny"].training_flops(np.asarray([(result["source"], result["slots"])] * 2))
    assert result["utilisation"] == pytest.approx(flops / result["step_s"] / 1e12)
    assert result["slots"] >= 8 + 3 and result["compiled_bytes"] > 0 and result["estimate_bytes"] > 0
    assert result["compile_s"] > 0 and result["remat"] == "none"
    assert "tiny, batch 2" in capsys.readouterr().out


def test_each_test_is_written_down_as_it_ends(tmp_path):
    records = suite.Records(str(tmp_path / "out.json"))

    def report(name, when, outcome):
        return SimpleNamespace(nodeid=name, when=when, outcome=outcome, duration=0.5, longrepr="why")

    for phase in ("setup", "call", "teardown"):
        records.pytest_runtest_logreport(report("a", phase, "passed"))
    records.pytest_runtest_logreport(report("b", "setup", "skipped"))
    records.pytest_runtest_logreport(report("c", "call", "failed"))
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(r["name"], r["outcome"], r.get("error")) for r in found] == [
        ("a", "passed", None),
        ("b", "skipped", None),
        ("c", "failed", "why"),
    ]


# The tables.


def measured(system, steps, decode_ms, **more):
    encode = {"encode_s": 1e-3, "pattern": "8x14", "batch": 1}
    return {"system": system, "steps": steps, "decode_s": decode_ms / 1e3, **encode, **more}


OF_A_STEP = ("model", "batch", "source", "slots", "dtype", "remat", "accumulate", "step_s", "utilisation")
SUMMARY = {
    "rehearsal": False,
    "began": 0,
    "device": {"platform": "gpu", "kind": "NVIDIA H200", "memory": 105 * 2**30, "versions": {"jax": "0.11.2"}},
    "wheels": {"installed": ["pytest"], "failures": []},
    "parts": [
        {
            "name": "kernels",
            "about": "own kernels",
            "status": "failed",
            "said": "some reason",
            "results": {
                "agrees": False,
                "results": [
                    {"name": "random numbers", "agrees": True, "apart": 0.0123},
                    {"name": "outputs", "agrees": False, "error": "Error: a|b"},
                    {"name": "float32", "agrees": None, "error": "no room"},
                ],
            },
        },
        {
            "name": "decode",
            "about": "T5-Base",
            "status": "timed out",
            "said": "",
            "results": {
                "model": "base",
                "dtype": "bfloat16",
                "source": 512,
                "failures": [{"system": "hf", "batch": 1, "pattern": "8x14", "error": "OutOfMemoryError: no room"}],
                "results": [
                    measured("pipejax-pipelined", 22, 11.0, kernels="Gpu"),
                    measured("pipejax-sequential", 120, 48.0, kernels="Xla"),
                    measured("pipejax-sequential-xla", 120, 96.0, kernels="Xla"),
                    measured("hf", 120, 1100.0, batch=8),
                ],
            },
        },
        {
            "name": "buffers",
            "about": "the loop",
            "status": "done",
            "results": {
                "tried": [{"flags": "--a", "taken": False}, {"flags": "--b", "taken": True}],
                "results": [measured("pipejax-pipelined", 22, 4.4, setting="loop", flags="--b")],
            },
        },
        {
            "name": "train",
            "about": "a step",
            "status": "done",
            "results": {
                "failures": [],
                "results": [
                    dict(zip(OF_A_STEP, ("large", 24, 2048, 768, "bfloat16", "layers", 4, 0.5, 0.314), strict=True))
                    | {"peak_bytes": 20 * 2**30, "compiled_bytes": 2**31, "estimate_bytes": 2**30}
                ],
            },
        },
        {
            "name": "train-peers",
            "about": "transformers",
            "status": "done",
            "results": {
                "failures": [
                    {
                        "system": "transformers",
                        "model": "large",
                        "source": 2048,
                        "error": "OutOfMemoryError: no room",
                    }
                ],
                "results": [
                    dict(zip(OF_A_STEP, ("base", 24, 2048, 768, "bfloat16", "none", 4, 1.5, None), strict=True))
                    | {"system": "transformers", "compile_s": 2.5, "peak_bytes": None}
                ],
            },
        },
        {
            "name": "profile",
            "about": "kernels and waiting",
            "status": "done",
            "results": {
                "failures": [],
                "results": [
                    {
                        "name": "base, a training step",
                        "seconds": 0.5,
                        "busy_s": 0.4,
                        "kernels": 7,
                        "gaps": 2,
                        "gaps_s": 0.1,
                        "most": [{"name": "a|kernel", "seconds": 0.2, "count": 3}],
                    }
                ],
            },
        },
        {
            "name": "graph",
            "about": "by hand",
            "status": "done",
            "results": {"torch": "2.11", "source": 512, "results": [{"model": "base", "queries": 9, "step_s": 0.0007}]},
        },
        {
            "name": "tests",
            "about": "tests",
            "status": "done",
            "results": {"results": [{"name": "a", "outcome": "passed"}, {"name": "b", "outcome": "failed"}]},
        },
        {"name": "large", "about": "T5-Large", "status": "failed", "said": "x\nsome `reason`\n", "results": None},
        {"name": "compiled", "about": "compiled", "status": "cut off"},
    ],
}


@pytest.mark.parametrize(
    "line",
    [
        "NVIDIA H200 with 105 GiB for JAX; jax 0.11.2; 1970-01-01.",
        "**own kernels: failed**; what it found is here.",
        "Own kernels **do not agree** with XLA:",
        "| random numbers | yes | apart 0.0123 |",
        "| outputs | **no** | Error: a/b |",
        "| float32 | not compared | no room |",
        "**T5-Base: timed out**; what it found is here.",
        "| 1 | 8x14 | pipelined | 22 | 0.500 | 1.00 | 11.00 | 1.00 | 1.00 |",
        "|  |  | sequential, XLA's kernels | 120 | 0.400 | 1.00 | 48.00 | 4.36 | 4.08 |",
        "| 8 | 8x14 | transformers | 120 | 9.167 | 1.00 | 1100.00 | 1.00 | 1.00 |",
        "Failed: transformers (1, 8x14): `OutOfMemoryError: no room`.",
        "| with the loop | `--b` | pipelined | 0.200 | 4.40 |",
        "Refused, or failed: `--a`.",
        "| pipejax | large | bfloat16, batch 24, 2048 + 768 tokens, remat layers, accumulate 4 "
        "| 0.500 | 31.4% |  |  | 20.00 | 2.00 | 1.00 |",
        "| transformers | base | bfloat16, batch 24, 2048 + 768 tokens, remat none, accumulate 4 "
        "| 1.500 |  | 2.5 |  |  |  |  |",
        "Failed: transformers, large, 2048: `OutOfMemoryError: no room`.",
        "| base, a training step | 40% a/kernel | 500.00 | 400.00 | 100.00 | 7 | 2 |",
        "A step by hand in PyTorch 2.11, in a CUDA graph, a source of 512 tokens:",
        "| base | 9 | 0.700 |",
        "Tests of the suite on this device: 1 passed, 1 failed.",
        "- `b` failed",
        "**T5-Large: failed**: `some 'reason'`.",
        "**compiled: cut off**.",
    ],
)
def test_page_shows_the_results(line):
    assert line in gpu_tables.page(json.loads(json.dumps(SUMMARY)))


def test_page_without_results_says_that_it_was_never_run() -> None:
    said = "\n".join(gpu_tables.page(None))
    assert "Nobody has run this" in said and "lab/benchmarks/gpu.sh" in said and "make gpu-wheels" in said


def test_results_that_are_kept_are_no_rehearsal() -> None:
    """The page is made from this file, if there is one."""
    found = json.loads(gpu.RESULTS.read_text()) if gpu.RESULTS.exists() else None
    assert found is None or (not found["rehearsal"] and found["device"]["platform"] == "gpu")
    assert gpu_tables.page(found)


def test_batches_of_other_lengths_have_as_many_tokens_as_examples_allow():
    given = config_lib.load(str(ROOT / "configs" / "jsonl.py"), [])
    found = [steps.of_length(given, x) for x in (512, 2048, 4096, 8192, 16384)]
    sizes = [(c.data.max_source, c.train.batch_size, c.train.accumulate, c.train.pack) for c in found]
    assert sizes == [(512, 96, 4, 3), (2048, 24, 4, 0), (4096, 12, 4, 3), (8192, 4, 4, 1), (16384, 4, 4, 1)]
    assert all(step_check(config) for config in found)


def step_check(config):
    check_batch(config, SimpleNamespace(shape={"data": 1, "fsdp": 1}))
    return True


def test_profile_separates_kernel_time_from_gaps():
    """By hand: two streams that overlap, a gap of the host's, and one that is too short to be one."""
    found = profile.kernels([("b", 2.0, 3.0), ("a", 0.0, 1.0), ("a", 0.5, 1.5), ("c", 3.000001, 4.0), ("d", 3.1, 3.2)])
    assert found["kernels"] == 5 and found["gaps"] == 1 and found["gaps_s"] == pytest.approx(0.5)
    assert found["busy_s"] == pytest.approx(1.5 + 1.0 + 0.999999)
    assert [(x["name"], x["count"]) for x in found["most"]][:2] == [("a", 2), ("b", 1)]
    assert profile.kernels([])["busy_s"] == 0


def test_trace_kernels_come_from_device_streams_only():
    event = "events {{ metadata_id: {0} offset_ps: {1} duration_ps: 2000000000 }}"
    names = "".join(f'event_metadata {{ key: {i} value {{ id: {i} name: "k{i}" }} }} ' for i in (1, 2))
    lines = f'lines {{ name: "Stream #7(Compute)" timestamp_ns: 1000 {event.format(1, 0)} }} '
    other = f'lines {{ name: "XLA Modules" timestamp_ns: 1000 {event.format(2, 0)} }} '
    text = f'planes {{ name: "/device:GPU:0" {lines} {other} {names} }} planes {{ name: "/host:CPU" '
    text += f'lines {{ name: "tf_XLAEigen/1" timestamp_ns: 1000 {event.format(2, 0)} }} {names} }}'
    trace = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
    ((name, begin, end),) = profile.events(trace)
    assert name == "k1" and begin == pytest.approx(1e-6) and end - begin == pytest.approx(2e-3)


def test_the_step_by_hand_is_the_models():
    """Beside `T5.step`, with the whole cache as keys; three steps of three queries."""
    config, count, slots = systems.SIZES["tiny"], 3, 16
    params = systems.random_params(config, seed=3)
    step = graph.Step(config, params, count, 5, slots, device="cpu", dtype="float32")
    call, model = step.captured(), T5(config)
    variables = {"params": jax.tree.map(jax.numpy.asarray, params)}
    mask = np.ones((1, 5), bool)
    memory = model.apply(variables, step.memory[None], mask, method=lambda m, *given: m.decoder.memorize(*given))
    caches = tuple(
        tuple(np.zeros((1, config.num_heads, slots, config.d_kv), np.float32) for _ in "kv")
        for _ in range(config.num_decoder_layers)
    )
    time_, row = np.arange(slots) // count, np.arange(slots) % count
    tokens = np.zeros((1, count), np.int32)
    for number in range(3):
        seen = (time_ <= number) & (row <= np.arange(count)[:, None])
        given = tokens, seen[None], (np.arange(count) + number)[None], (row + time_)[None], memory, caches
        hidden, caches = model.apply(variables, *given, np.array([number * count]), method="step")
        logits = model.apply(variables, hidden, method="logits")
        call()
        np.testing.assert_allclose(step.logits.numpy(), logits[0], rtol=1e-4, atol=1e-4)
        tokens = np.asarray(logits.argmax(-1), np.int32)
        assert step.tokens.tolist() == tokens[0].tolist()


@pytest.mark.slow
def test_transformers_make_the_steps_of_the_same_work(tmp_path):
    settings = ("train.batch_size=2", "train.accumulate=2", "data.max_source=16", "data.max_target=8")
    given = [x for setting in settings for x in ("--set", setting)] + ["--steps", "2", "--models", "tiny"]
    given += ["--config", str(ROOT / "configs" / "jsonl.py"), "--ways", "plain,checkpointing"]
    assert training.main([*given, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [r["system"] for r in found] == ["transformers", "transformers, gradient checkpointing"]
    assert {r["batch"] for r in found} == {2} and all(r["slots"] >= 8 and r["step_s"] > 0 for r in found)
