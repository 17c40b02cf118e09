"""Commands with paths that lead through other directories: `../x` is resolved as by the system."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pipejax import checkpoint
from pipejax.__main__ import main
from pipejax.system import cli
from support import tiny, tiny_run
from support.refusals import refuses

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def room(tmp_path_factory, tokenizer_files):
    """A run, its Hugging Face model, data and records; commands start in the folder `deep` of the same folder."""
    room = tmp_path_factory.mktemp("room")
    (room / "deep").mkdir()
    config = tiny.change(tiny.RUN_ON_ONE, train={"method": "pipelined"})
    checkpoint.save_params(
        room / "run", config, tiny.MODEL.init_params(jax.random.key(0)), tokenizer_source=tokenizer_files
    )
    lines = [{"id": str(i), "source": "apples , roses", "targets": ["apples", "roses"]} for i in range(3)]
    (room / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["convert", "to-hf", str(room / "run"), str(room / "hf")]) == 0
    (room / "predicted.jsonl").write_text('{"id": "0", "gold": ["a"], "pred": ["a"]}\n')
    (room / "records.jsonl").write_text(
        '{"id": "0", "method": "pipelined", "rows": ["a"], "row_ids": [[5]], "steps": 3}\n'
    )
    return room


def decode(run, data, output, *more):
    return ["decode", "--checkpoint", str(run), "--input", str(data), "--output", str(output), *more]


COMMANDS = {
    "decode": decode("{}/run", "{}/data.jsonl", "{}/out/d.jsonl"),
    "decode a model of Hugging Face's": decode("{}/hf", "{}/data.jsonl", "{}/out/f.jsonl"),
    "evaluate": [
        *("evaluate", "--checkpoint", "{}/run", "--task", "jsonl", "--set", "data.test={}/data.jsonl"),
        *("--json", "{}/out/scores.json", "--predictions", "{}/out/predictions.jsonl"),
    ],
    "export": ["export", "{}/out/export", "--checkpoint", "{}/run", "--batch", "1", "--source", "16"],
    "convert to-hf": ["convert", "to-hf", "{}/run", "{}/out/hf"],
    "convert from-hf": ["convert", "from-hf", "{}/hf", "{}/out/run"],
    "convert quantize": ["convert", "quantize", "{}/run", "{}/out/int8"],
    "checkpoint verify": ["checkpoint", "verify", "{}/run"],
    "data stats": ["data", "stats", "jsonl", "--set", "data.train={}/data.jsonl", "--tokenizer", "{}/run/tokenizer"],
    "metrics": ["metrics", "exact", "{}/predicted.jsonl"],
    "probe": [
        *("probe", "--checkpoint", "{}/run", "--input", "{}/data.jsonl", "--output", "{}/out/probe", "--limit", "2"),
    ],
    "picture": ["picture", "{}/records.jsonl", "--output", "{}/out/grid.svg", "--checkpoint", "{}/run"],
}
COMPILING = ("evaluate", "probe", "export", "convert quantize", "decode a model of Hugging Face's")
MADE = {  # files below `out`; other files must not exist
    "decode": ["d.jsonl"],
    "decode a model of Hugging Face's": ["f.jsonl"],
    "evaluate": ["predictions.jsonl", "scores.json"],
    "export": ["export"],
    "convert to-hf": ["hf"],
    "convert from-hf": ["run"],
    "convert quantize": ["int8"],
    "probe": ["probe"],
    "picture": ["grid.svg"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in COMPILING else ()) for name in COMMANDS]
)
def test_a_command_reads_and_writes_where_the_system_would(room, monkeypatch, name):
    (room / "out").mkdir(exist_ok=True)
    before = {*room.rglob("*")}
    monkeypatch.setenv("PIPEJAX_CACHE", "../out/cache")
    if name not in COMPILING:
        monkeypatch.setenv("PIPEJAX_NATIVE", "off")  # compiling the kernel into this cache takes long
    monkeypatch.chdir(room / "deep")
    assert main([word.replace("{}", "..") for word in COMMANDS[name]]) == 0
    made = {Path(*path.relative_to(room).parts[:2]) for path in {*room.rglob("*")} - before}
    assert sorted(map(str, made - {Path("out/cache")})) == [f"out/{child}" for child in MADE.get(name, [])]


@pytest.mark.parametrize("flag", ["--output", "--json", "--predictions"])
def test_output_through_an_absent_directory_is_refused_at_once(tmp_path, monkeypatch, flag):
    """The system enters `absent` first; a link may lead to a file that does not exist yet."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/link").symlink_to("../new.jsonl")
    (tmp_path / "deep/lost").symlink_to("../absent/new.jsonl")
    monkeypatch.chdir(tmp_path / "deep")
    for target, missing in (("../absent/../x", "../absent/.."), ("../absent/x", "../absent"), ("lost", "/absent")):
        with refuses(f"{flag} {target}", found=missing):
            cli.check_output_file(flag, target)
    for target in ("../x", "../deep/../x", "link", "../deep/link"):
        cli.check_output_file(flag, target)


@pytest.mark.slow
def test_training_with_relative_paths_writes_nothing_elsewhere(tmp_path):
    """It trains, resumes and decodes from a sibling directory, with the cache in another: no other files appear."""
    prepared = tiny_run.prepare(tmp_path / "work/data")
    prepared.write_text(prepared.read_text().replace(str(prepared.parent), "../data"))
    (tmp_path / "work/deep").mkdir()
    environment = {**os.environ, "PIPEJAX_CACHE": "../c", "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": ""}

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-m", "pipejax", *words],
            cwd=tmp_path / "work/deep",
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    small = ["--set", "train.evaluate_every=9", "--set", "train.checkpoint_every=2"]
    train = ["train", "--config", "../data/config.py", "--workdir", "../x", *small]
    run(*train, "--set", "train.steps=2")
    assert "resuming at step 2" in run(*train, "--set", "train.steps=3")
    run(*decode("../x", "../data/dev.jsonl", "../out.jsonl"))
    assert len((tmp_path / "work/out.jsonl").read_text().splitlines()) == 16
    assert tiny_run.committed(tmp_path / "work/x") == [2, 3]
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"c", "data", "deep", "out.jsonl", "x"}
    assert any((tmp_path / "work/c").iterdir()) and not any((tmp_path / "work/deep").iterdir())
