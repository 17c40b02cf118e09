"""The experiments that count and time drafts, on real answers and with trained weights."""

import dataclasses
import json

import numpy as np
import pytest

from lab.experiments import drafts as experiment
from lab.experiments import trained_drafts
from pipejax import checkpoint
from pipejax.apps import demo
from pipejax.config import Config, DecodeConfig, TrainConfig
from pipejax.system.errors import UserError
from support import oracle, wavefront
from support.batches import sources
from support.tiny import FEW_WORDS as TINY


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_simulation_equals_the_wavefront(delay):
    rng = np.random.default_rng(delay)
    for _ in range(50):
        source = rng.integers(2, 7, 30).tolist()
        rows = [rng.integers(2, 7, rng.integers(1, 9)).tolist() for _ in range(rng.integers(1, 6))]
        look = experiment.lookup(source)
        expected = wavefront.calls(
            [[0, *row, 1] for row in [*rows, []]],
            lambda i, length, rows=rows, look=look: look([*rows, []][i][:length]),
            delay=delay,
            time_max=99,
        )
        found = experiment.simulated([[*row, 1] for row in [*rows, []]], look, delay=delay)
        # With Δt = 1, a row starts before any draft of the row above reaches the start.
        assert found == expected if delay == 1 else found >= expected


def test_experiment_counts_calls(tmp_path, tokenizer_files, monkeypatch, capsys):
    """The answers can be copied completely, and pipejax's drafts are at least as good as the simulation."""
    (tmp_path / "multispanqa").mkdir()
    (tmp_path / "t5_tokenizer").symlink_to(tokenizer_files)
    sources_ = [demo.examples("test")[i].source for i in range(3)]
    lines = [{"source": text, "targets": [text[5:40], text[20:70]]} for text in sources_]
    (tmp_path / "multispanqa" / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("PIPEJAX_DATA", str(tmp_path))
    output = tmp_path / "calls.json"
    assert experiment.main(["--only", "MSQA", "--json", str(output)]) == 0
    found = json.loads(output.read_text())["MSQA test"]
    assert "| MSQA test | 3 |" in capsys.readouterr().out
    for name in ("sequential", "pipelined"):
        assert found[f"{name}, product"] <= 1.05 * found[f"{name}, simulated"] < found[name]
    monkeypatch.setenv("PIPEJAX_DATA", str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"PIPEJAX_DATA: found .*absent'; expected the directory of the data sets"):
        experiment.main([])


@pytest.mark.long
@pytest.mark.parametrize("weights", ["float32", "float32,int8"])
def test_drafts_of_trained_weights_are_timed_beside_transformers(weights, tmp_path, capsys, monkeypatch):
    """Each system writes the same answers, and the numbers of calls equal the records."""
    monkeypatch.setattr(trained_drafts, "use_threads", lambda count: None)  # the test process keeps its threads
    # transformers' lookup assumes equal numbers of layers.
    model = dataclasses.replace(TINY, num_layers=TINY.num_decoder_layers)
    config = Config(name="run", model=model, train=TrainConfig(method="sequential"), decode=DecodeConfig(max_length=20))
    params = oracle.random_params(model, np.random.default_rng(8))
    checkpoint.save_params(tmp_path / "run", config, params)
    given = sources(np.random.default_rng(8), 5, TINY.vocab_size)
    lines = "".join(json.dumps({"source_ids": ids}) + "\n" for ids in given)
    (tmp_path / "in.jsonl").write_text(lines)
    flags = ["--checkpoint", str(tmp_path / "run"), "--input", str(tmp_path / "in.jsonl"), "--rounds", "1"]
    peers = "hf,hf+lookup,hf+assistant"
    flags += ["--drafts", "none,source,model", "--weights", weights, "--peers", peers]
    flags += ["--tokens", "3", "--threads", "1"]
    with pytest.raises(UserError, match="--small: found none; expected the checkpoint"):
        trained_drafts.main(flags)
    flags += ["--small", str(tmp_path / "run")]  # a T5 that drafts for itself
    assert trained_drafts.main([*flags, "--json", str(tmp_path / "out.json")]) == 0
    found = {r["system"]: r for r in json.loads((tmp_path / "out.json").read_text())["results"]}
    assert [r["equal"] for r in found.values()] == [1.0] * (3 * len(weights.split(",")) + 3)
    plain = found["sequential, float32, none"]
    assert found["sequential, float32, source"]["calls"] <= plain["calls"] == found["hf"]["calls"]
    assert found["sequential, float32, model"]["calls"] <= plain["calls"] > found["hf+assistant"]["calls"]
    known = {name: r["accepted"] for name, r in found.items() if r["accepted"] is not None}
    drafted = {f"sequential, {held}, {draft}" for held in weights.split(",") for draft in ("source", "model")}
    assert known.keys() == drafted
    for name, share in known.items():
        assert 0 <= share <= 1 and (share > 0) == (found[name]["calls"] < found[found[name]["beside"]]["calls"])
    assert "hf+lookup" in capsys.readouterr().out
    with pytest.raises(UserError, match="--drafts: found a list without none"):
        trained_drafts.main([*flags, "--drafts", "source"])
