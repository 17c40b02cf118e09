"""The experiment with weights in fewer bytes: its figures follow from the records of `load`."""

import json

import numpy as np
import pytest

from lab.benchmarks import plot
from lab.experiments import rounding
from pipejax import checkpoint
from pipejax.apps import demo
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, T5Config, TrainConfig
from pipejax.inference.loading import load
from pipejax.system.errors import UserError
from support import oracle
from support.tiny import change

MODEL = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_heads=2, num_layers=1, num_decoder_layers=1)
CONFIG = Config(
    model=MODEL,
    grid=GridConfig(delay=1, time_max=12, sub_max=4),
    data=DataConfig(task="none", separator=" "),
    train=TrainConfig(method="pipelined"),
    decode=DecodeConfig(max_length=12),
)


@pytest.mark.slow
def test_cost_of_rounding_equals_difference_of_both_decodes(tokenizer_files, tmp_path, capsys, monkeypatch):
    """Shares and means of the table equal those computed from records by `load`."""
    monkeypatch.setattr(rounding, "use_threads", lambda count: None)  # the test process keeps its threads
    texts = [demo.examples("test")[i].source for i in range(5)]
    lines = [json.dumps({"id": str(i), "source": text, "targets": ["a"]}) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "test.jsonl").write_text("".join(lines))
    as_lines = change(CONFIG, data={"task": "demo"})  # its test split differs from the file
    checkpoint.save_params(
        tmp_path / "run",
        as_lines,
        oracle.random_params(MODEL, np.random.default_rng(314)),
        tokenizer_source=tokenizer_files,
    )
    flags = ["--checkpoint", str(tmp_path / "run"), "--test", str(tmp_path / "test.jsonl")]
    assert rounding.main([*flags, "--json", str(tmp_path / "out.json")]) == 0
    plain = []
    for found, kind in zip(json.loads((tmp_path / "out.json").read_text())["results"], rounding.KINDS, strict=True):
        given = load(tmp_path / "run", overrides=[f"decode.weights={kind}", "decode.scores=true"]).decode(texts)
        plain = plain or given
        equal = [a["row_ids"] == b["row_ids"] for a, b in zip(given, plain, strict=True)]
        scores = [x for record in given for row in record["log_probs"] for x in row]
        assert (found["weights"], found["strategy"], found["metric"]) == (kind, "pipelined", "em_f1")
        assert found["equal"] == 20 * sum(equal) and found["milliseconds"] > 0
        assert found["log_prob"] == pytest.approx(np.mean(scores), abs=1e-4)
    assert capsys.readouterr().out.count("%") == 3
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        assert plot.main([str(tmp_path / "out.json"), "--output", str(picture)]) == 0
    assert pictures[0].read_bytes() == pictures[1].read_bytes() and b"milliseconds" in pictures[0].read_bytes()
    (tmp_path / "test.jsonl").write_text("")
    with pytest.raises(UserError, match="found no"):
        rounding.main(flags)
    checkpoint.save_params(tmp_path / "other", CONFIG, oracle.random_params(MODEL, np.random.default_rng(314)))
    with pytest.raises(UserError, match=r"^--test: found none; expected a file"):
        rounding.main(["--checkpoint", str(tmp_path / "other")])
