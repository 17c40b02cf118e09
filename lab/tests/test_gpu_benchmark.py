"""lab/benchmarks/gpu.sh: parts share a device, results are saved immediately, the run ends in time, tables have all."""

import copy
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
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
    gpu,
    gpu_decode,
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

ROOT = gpu.ROOT
BEGIN = "import os, sys, time; from lab.benchmarks.gpu import Channel; c = Channel(int(sys.argv[1]))\n"
TURN = """
with c.turn() as others:
    begun = time.time()
    time.sleep({held})
    c.send(results=[{{'name': {name!r}, 'begun': begun, 'ended': time.time(), 'compiling': others}}])
"""


def run(codes, *, seconds=60.0, at_once=9):
    """Returns the records of parts with this code, and all saved results. Parts named "...quiet" are quiet."""
    parts = [Part(name, 1.5, f"about {name}", quiet=name.endswith("quiet")) for name in codes]
    saved = []
    found = gpu.run(
        parts,
        lambda records: saved.append(copy.deepcopy(records)),
        lambda part: ("-c", BEGIN + codes[part.name]),
        dict(os.environ),
        seconds=seconds,
        at_once=at_once,
    )
    assert saved[-1] == found
    return {record["name"]: record for record in found}, saved


# The run.


@pytest.mark.slow
def test_parts_measure_one_after_the_other_and_quiet_ones_when_none_compiles():
    """A quiet part that is most important and asks first measures only after the slow compiler has finished."""
    turns = {name: TURN.format(held=0.3, name=name) for name in ("quiet", "first", "second")}
    codes = {name: "time.sleep(0.2)" + turns[name] * 2 for name in ("quiet", "first")}
    codes["second"] = "time.sleep(2)" + turns["second"]
    found, _ = run(codes)
    assert {record["status"] for record in found.values()} == {"done"}
    every = sorted((r for record in found.values() for r in record["results"]), key=lambda r: r["begun"])
    assert [r["name"] for r in every][:2] == ["first", "first"] and len(every) == 5
    assert all(before["ended"] <= after["begun"] for before, after in itertools.pairwise(every))
    assert {r["compiling"] for r in every if r["name"] == "quiet"} == {0}
    assert every[0]["compiling"] >= 1  # "second" still compiled


@pytest.mark.slow
def test_more_important_part_has_the_next_turn(tmp_path):
    """Two parts ask while another one holds the device, and the less important part asks first."""
    go = str(tmp_path / "go")
    waits = f"while not os.path.exists({go!r}): time.sleep(0.01)\n"
    holds = f"open({go!r}, 'w'); time.sleep(1)"
    codes = {
        "worthy": f"{waits}time.sleep(0.3){TURN.format(held=0.1, name='worthy')}",
        "holds": TURN.format(held=0.1, name="holds").replace("time.sleep(0.1)", holds),
        "less": waits + TURN.format(held=0.1, name="less"),
    }
    found, _ = run(codes)
    begun = {name: record["results"][0]["begun"] for name, record in found.items()}
    assert begun["holds"] < begun["worthy"] < begun["less"]


def is_running(pid: int) -> bool:
    """Whether a process exists, and is not a zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_results_are_kept_whichever_way_a_part_ends():
    child = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    sends = "c.send(results=[{'name': 'before', 'x': 1}])\n"
    codes = {
        "holds": sends + "with c.turn(): time.sleep(60)",
        "fails": sends + "sys.exit('no such luck')",
        "partly": sends + "c.send(results=[{'name': 'a', 'error': 'MemoryError'}])",
        "skips": "c.send(skipped='PyTorch is not installed')",
        "dawdles": sends + "c.send(code=0); c._connection.close(); time.sleep(60)",
        "hangs": sends + child,
    }
    began = time.time()
    found, saved = run(codes, seconds=9, at_once=6)
    assert time.time() - began < 9 + gpu.ENDING
    assert {name: record["status"] for name, record in found.items()} == {
        "holds": "cut off",
        "fails": "failed",
        "partly": "failed",
        "skips": "skipped",
        "dawdles": "done",
        "hangs": "cut off",
    }
    assert found["holds"]["cut"] == "its 2 s on the device are over"
    assert found["hangs"]["cut"] == "the time of the run was over while it was compiling"
    assert all(record["results"] for name, record in found.items() if name != "skips")
    assert found["fails"]["log"].strip() == "no such luck"
    until, pid = time.monotonic() + 5, int(found["hangs"]["log"])
    while is_running(pid):  # a killed process may exist a little longer
        assert time.monotonic() < until
        time.sleep(0.01)
    # Results were saved while the parts ran.
    running = [record for records in saved for record in records if record["status"] == "running" and record["results"]]
    assert {record["name"] for record in running} >= {"holds", "hangs"}
    text = "\n".join(gpu_tables.notes(found.values()))
    assert "about fails: failed, `no such luck`" in text and "about partly, a: `MemoryError`" in text
    assert "about skips: skipped, PyTorch is not installed" in text and "about holds: cut off, its 2 s" in text


@pytest.mark.slow
def test_parts_that_never_started_are_named():
    found, _ = run({"a": "time.sleep(60)", "b": ""}, seconds=1, at_once=1)
    assert found["b"]["status"] == "not started"
    assert "- about b: not started." in gpu_tables.notes(found.values())


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--parts", "decode,trian"])
    assert ended.value.code == 2
    assert "found 'trian'; expected some of train, attention," in capsys.readouterr().err


@pytest.mark.slow
def test_missing_gpu_is_an_error_except_in_a_rehearsal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIPEJAX_CACHE", str(tmp_path / "cache"))
    before = signal.getsignal(signal.SIGTERM)
    code = gpu.main([str(tmp_path / "out"), "--parts", "train"])
    signal.signal(signal.SIGTERM, before)
    assert code == 2
    assert "error: found no GPU (JAX on cpu); expected one, or --rehearse" in capsys.readouterr().err


@pytest.mark.slow
def test_results_so_far_survive_the_end_of_the_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from lab.benchmarks import gpu; folder = Path(sys.argv[1])\n"
        "gpu.signal.signal(gpu.signal.SIGTERM, gpu.interrupted)\n"
        f"begin = {BEGIN!r}\n"
        "ends = begin + \"c.send(results=[{'name': 'a'}]); time.sleep(1); os.kill(os.getppid(), 15); time.sleep(60)\"\n"
        "gpu.run([gpu.Part('a', 9, '')], lambda records: gpu.write(folder, {'parts': records}),\n"
        "        lambda part: ('-c', ends),\n"
        "        dict(gpu.os.environ), seconds=60, at_once=1)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False, capture_output=True)
    assert done.returncode != 0
    (record,) = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert record["results"] == [{"name": "a"}] and record["status"] == "cut off"


@pytest.mark.parametrize("arguments", [[], ["there"], ["--rehearse", "there"]])
def test_script_passes_its_arguments(arguments):
    done = subprocess.run(
        [ROOT / "lab" / "benchmarks" / "gpu.sh", *arguments],
        env=os.environ | {"PYTHON": "echo"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["-m", "lab.benchmarks.gpu", *arguments]


@pytest.mark.long
def test_the_whole_run_is_rehearsed(tmp_path, capsys):
    """All parts on this CPU, their figures where the machine does not matter, and all tables."""
    environment = os.environ | {"PIPEJAX_CACHE": str(tmp_path / "cache"), "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "lab" / "benchmarks" / "gpu.sh", "--rehearse", "--seconds", "1500", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    parts = {part["name"]: part for part in summary["parts"]}
    assert [*parts] == [part.name for part in gpu.PARTS]
    broken = {name: (part["status"], part["log"][-500:], part["results"]) for name, part in parts.items()}
    assert done.returncode == 0, {name: x for name, x in broken.items() if x[0] != "done"}
    assert done.stdout.startswith(("not installed", "train")) and "A rehearsal" in done.stdout
    attention = parts["attention"]["results"]
    errors = [r for r in attention if "xla_error" in r]
    assert len(errors) == 14 and all(r["blocks_error"] < 0.02 for r in errors)
    decodes = [r for name in ("decode", "launch") for r in parts[name]["results"] if "equal" in r]
    assert len(decodes) >= 4 and all(r["equal"] == 1 for r in decodes)
    agrees = {r["name"]: r["agrees"] for part in parts.values() for r in part["results"] if "agrees" in r}
    assert {name for name, value in agrees.items() if value is None} == {name for name in agrees if "child" in name}
    assert all(agrees[name] for name in agrees if "child" not in name)  # child processes find no GPU on a CPU
    assert [r["name"] for r in parts["train"]["results"]] == [
        "T5-Base, 32 tokens",
        "T5-Base, 32 tokens, from the cache",
    ]
    assert all(f"{table.title}:" in done.stdout for table in gpu_tables.TABLES)
    assert gpu_tables.main([str(tmp_path / "summary.json")]) == 2
    assert "found a rehearsal; expected a run on a GPU" in capsys.readouterr().err


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
    found = wheels.install(tmp_path / "absent", site, names=names)
    assert found["installed"] == [] and "make gpu-wheels" in found["failures"][0] and not any(site.iterdir())


def test_every_wheel_has_a_version() -> None:
    assert wheels.pins().keys() >= {*wheels.NAMES}


# Measurements.


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
    assert (found["apart"] == 0) == agrees  # the last result is float32
    assert four.tokens("float32", source, strategy)["equal"] <= 1


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


def test_each_test_is_recorded_as_it_ends(tmp_path):
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


def part(name, status="done", results=(), **more):
    return {"name": name, "about": f"about {name}", "status": status, "results": [*results], **more}


MOST = [{"name": "a|kernel", "seconds": 0.2, "count": 3000}]
SUMMARY = {
    "rehearsal": False,
    "began": 0,
    "limit": 280,
    "seconds": 271.2,
    "cache_filled": False,
    "wheels": {"installed": ["grain"], "failures": []},
    "parts": [
        part(
            "train",
            results=[
                {"name": "T5-Base, 2,048 tokens", "compile_s": 40.04, "step_s": 0.25, "utilisation": 0.242, "batch": 24}
                | {"remat": "layers", "peak_bytes": 5 * 2**30, "compiled_bytes": 2**31, "estimate_bytes": 2**30}
                | {"compiling": 3, "profile": {"seconds": 0.26, "busy_s": 0.24, "kernels": 12500, "most": MOST}},
                {"name": "T5-Base, 2,048 tokens, from the cache", "compile_s": 9.5, "compiling": 0},
            ],
            device={"platform": "gpu", "kind": "NVIDIA H200", "memory": 105 * 2**30, "versions": {"jax": "0.11.2"}},
            seconds=120.0,
            device_s=11.5,
        ),
        part(
            "attention",
            "cut off",
            [
                {"name": "encoder", "array": "output", "blocks_error": 0.0012, "xla_error": 0.0034},
                {"name": "encoder, blocks", "forward_s": 0.0021, "both_s": 0.0077, "scores": 7_700_000_000}
                | {"no_profile": "RuntimeError: CUPTI"},
            ],
            cut="its 30 s on the device are over",
        ),
        part(
            "decode",
            "failed",
            [
                {"name": "own kernels", "step_s": 0.0005, "fixed_s": 0.0015, "equal": 1.0, "host_loops": 0},
                {"name": "XLA's kernels", "error": "RuntimeError: `no`"},
            ],
            log="",
        ),
        part("transformers", "skipped", skipped="torch is not installed"),
        part("agreement", results=[{"name": "tokens", "agrees": False, "apart": 0.0123}]),
        part("graph", "not started"),
    ],
}


@pytest.mark.parametrize(
    "line",
    [
        "NVIDIA H200 with 105 GiB for JAX; jax 0.11.2; 1970-01-01, 271 s, with an empty cache of compiled programs.",
        "| T5-Base, 2,048 tokens* | layers | 24 | 0.250 | 24.2% | 40.0 | 5.0 | 2.0 | 1.0 |",
        "| T5-Base, 2,048 tokens, from the cache |  |  |  |  | 9.5 |  |  |  |",
        "\\* Other parts compiled on the same machine at that time.",
        "| `a/kernel` | 3,000 | 200.00 |",
        "| encoder | output | 0.0012 | 0.0034 |",
        "| encoder, blocks | 2.100 | 7.700 | 1.000 |",
        "| own kernels | 0.500 | 1.50 | 100% | 0 |",
        "| tokens | no | 0.0123 |",
        "- about decode, XLA's kernels: `RuntimeError: 'no'`.",
        "- about attention: cut off, its 30 s on the device are over.",
        "- about attention: no profile, `RuntimeError: CUPTI`.",
        "- about transformers: skipped, torch is not installed.",
        "- about graph: not started.",
    ],
)
def test_page_shows_the_results(line):
    assert line in gpu_tables.page(json.loads(json.dumps(SUMMARY)))


def test_tables_of_a_gpu_run_are_shown_on_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_tables, "RESULTS", tmp_path / "gpu.json")
    given = tmp_path / "summary.json"
    for summary, why in (
        (SUMMARY | {"rehearsal": True}, "found a rehearsal"),
        (SUMMARY | {"parts": SUMMARY["parts"][1:]}, "found a run on none"),
        ([], "found no summary of lab/benchmarks/gpu.sh"),
    ):
        given.write_text(json.dumps(summary))
        assert gpu_tables.main([str(given)]) == 2
        assert why in capsys.readouterr().err and not gpu_tables.RESULTS.exists()
    given.write_text(json.dumps(SUMMARY))
    assert gpu_tables.main([str(given)]) == 0
    assert json.loads(gpu_tables.RESULTS.read_text()) == SUMMARY
    assert "| tokens | no | 0.0123 |" in capsys.readouterr().out


def test_stored_results_are_from_a_gpu() -> None:
    found = json.loads(gpu_tables.RESULTS.read_text()) if gpu_tables.RESULTS.exists() else None
    assert found is None or (not found["rehearsal"] and gpu_tables.device_of(found)["platform"] == "gpu")
    assert gpu_tables.page(found)


def test_short_lines_name_every_part() -> None:
    assert [line.split()[:2] for line in gpu_tables.short(SUMMARY)][:3] == [
        ["installed", "from"],
        ["train", "done"],
        ["attention", "cut"],
    ]


def test_batches_of_other_lengths_have_about_as_many_tokens():
    given = config_lib.load(str(ROOT / "configs" / "jsonl.py"), [])
    found = [steps.of_length(given, x) for x in (512, 2048, 4096, 8192, 16384)]
    sizes = [(c.data.max_source, c.train.batch_size, c.train.accumulate, c.train.pack) for c in found]
    assert sizes == [(512, 96, 4, 3), (2048, 24, 4, 0), (4096, 12, 4, 3), (8192, 4, 4, 1), (16384, 4, 4, 1)]
    assert all(step_check(config) for config in found)


def step_check(config):
    check_batch(config, SimpleNamespace(shape={"data": 1, "fsdp": 1}))
    return True


def test_profile_separates_kernel_time_from_gaps():
    """A hand-made trace has two streams that overlap, a gap of the host, and a shorter gap that does not count."""
    found = profile.kernels([("b", 2.0, 3.0), ("a", 0.0, 1.0), ("a", 0.5, 1.5), ("c", 3.000001, 4.0), ("d", 3.1, 3.2)])
    assert found["kernels"] == 5 and found["gaps"] == 1 and found["gaps_s"] == pytest.approx(0.5)
    assert found["busy_s"] == pytest.approx(1.5 + 1.0 + 0.999999)
    assert [(x["name"], x["count"]) for x in found["most"]][:2] == [("a", 2), ("b", 1)]
    assert profile.kernels([])["busy_s"] == 0


def test_loops_of_the_host_are_outside_of_graphs(tmp_path):
    assert gpu_decode.host_loops(tmp_path) is None
    thunks = tmp_path / "module_1.jit_decode.thunk_sequence.txt"
    thunks.write_text("001: kWhile [x]\n  002: kWhile [x]\n    003: kCustomKernel [x]\n")
    assert gpu_decode.host_loops(tmp_path) == 2
    graphs = tmp_path / "module_1.jit_decode.thunk_sequence_after_thunk_passes.txt"
    graphs.write_text("001: kCommandBuffer [x]\n  002: kWhile [x]\n    003: kCustomKernel [x]\n")
    assert gpu_decode.host_loops(tmp_path) == 0


def test_time_of_a_decode_has_a_fixed_part():
    assert gpu_decode.slope(20, 0.013, 44, 0.025) == pytest.approx({"step_s": 0.0005, "fixed_s": 0.003})


def test_failed_profile_keeps_the_other_figures(monkeypatch):
    def refuse(directory):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(jax.profiler, "trace", refuse)
    assert profile.try_profile(lambda: None) == {"no_profile": "RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"}


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


def test_handwritten_step_equals_the_models_step():
    """Compared with `T5.step`, with the whole cache as keys, in three steps of three queries."""
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
def test_training_steps_of_transformers_are_measured(tmp_path):
    settings = ("train.batch_size=2", "train.accumulate=2", "data.max_source=16", "data.max_target=8")
    given = [x for setting in settings for x in ("--set", setting)] + ["--steps", "2", "--models", "tiny"]
    given += ["--config", str(ROOT / "configs" / "jsonl.py"), "--ways", "plain,checkpointing"]
    assert training.main([*given, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [r["system"] for r in found] == ["transformers", "transformers, gradient checkpointing"]
    assert {r["batch"] for r in found} == {2} and all(r["slots"] >= 8 and r["step_s"] > 0 for r in found)
