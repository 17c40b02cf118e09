"""The trainer: its loss equals independent losses, bit-exact resume, meshes, and refusals."""

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
import torch
from transformers import T5Config as HfConfig
from transformers import T5ForConditionalGeneration

from pipejax import checkpoint, grid
from pipejax import config as config_lib
from pipejax.apps import demo, log_summary
from pipejax.apps.compare import compare_command
from pipejax.apps.plan.dry_run import dry_run
from pipejax.config import Config, DataConfig, DecodeConfig, MeshConfig
from pipejax.convert import huggingface
from pipejax.data.batches import TrainingBatches
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.data.shapes import Shapes
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError
from pipejax.training import examiner, loop
from pipejax.training.loop import fit
from pipejax.training.run_directory import RunDirectory
from support import tiny_run as runs
from support.refusals import refuses
from support.tiny import MODEL, RUN, change, metrics, untimed
from support.tiny import RUN_ON_ONE as ON_ONE

CONFIG = change(RUN, train={"shapes": 2})
ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compiled_once):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    assert fit(CONFIG, directory) == 0
    return directory


def test_a_target_of_many_rows_is_cut_in_few_attempts(tokenizer):
    """Each attempt reads the text again: thousands of rows must not need thousands of attempts."""

    class Counting(Tokenizer):
        calls = 0

        def encode(self, text):
            Counting.calls += 1
            return tokenizer.encode(text)

    counting, rows = Counting.__new__(Counting), ("honey",) * 4000
    vars(counting).update(vars(tokenizer))
    config = change(CONFIG, data={"max_target": 101}, train={"method": "sequential"})
    encoded = encode_example(Example("x", "deliver honey .", rows), counting, config, MODEL)
    assert encoded.target_was_cut and Counting.calls <= 15
    separator = tokenizer.encode(";")
    one = [*tokenizer.encode("honey"), *separator]
    assert encoded.target.targets.tolist()[:-1] == (one * 51)[:99] and len(encoded.target.targets) == 100


def test_a_cut_target_loses_its_last_rows_and_its_empty_row(tokenizer):
    rows = ("large red apples", "honey", "tiny old blue maps")
    words = [tokenizer.encode(row) for row in rows]

    def slots(most, **sections):
        config = change(CONFIG, data={"max_target": most}, grid={"delay": 1}, **sections)
        encoded = encode_example(Example("x", "deliver honey .", rows), tokenizer, config, MODEL)
        real = encoded.target.weights > 0
        return encoded.target_was_cut, encoded.target.targets[real].tolist()

    whole = [*words[0], 1, *words[1], 1, *words[2], 1, 1]
    assert slots(12) == (False, whole)
    assert slots(11) == (True, whole[:-1])
    assert slots(10) == (True, [*words[0], 1, *words[1], 1])
    assert slots(5) == (True, [*words[0], 1])
    assert slots(3) == (True, words[0][:2])  # not one row fits: it is cut, and no eos is trained
    sequential = {"train": {"method": "sequential"}}
    separator = tokenizer.encode(";")
    joined = [*words[0], *separator, *words[1], *separator, *words[2]]
    assert slots(11, **sequential) == (False, [*joined, 1])
    assert slots(10, **sequential) == (True, joined[:5])
    assert slots(3, **sequential) == (True, words[0][:2])


@pytest.mark.parametrize("objective", ["pipelined", "sequential"])
def test_end_tokens_within_a_text_do_not_end_the_row(tokenizer, objective):
    """The tokenizer reads "</s>" as the token that ends a row."""
    config = change(CONFIG, train={"method": objective})
    spelt, plain = (
        encode_example(Example("x", "deliver apples .", (row,)), tokenizer, config, MODEL).target
        for row in ("small </s> apples", "small apples")
    )
    assert all((a == b).all() for a, b in zip(spelt, plain, strict=True))


def test_an_over_long_source_is_cut_and_keeps_its_eos(tokenizer):
    example, short = Example("x", "deliver red apples .", ("red apples",)), change(CONFIG, data={"max_source": 3})
    encoded = encode_example(example, tokenizer, short, MODEL)
    assert encoded.source.tolist() == [*tokenizer.encode("deliver red"), 1] and encoded.source_was_cut


@pytest.mark.slow
def test_resume_is_exact(finished, tmp_path, said):
    assert fit(change(CONFIG, train={"steps": 2}), tmp_path) == 0
    assert fit(change(CONFIG, train={"steps": 5}), tmp_path) == 0
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "step": 6, "loss": 0}\n{"torn')  # the files that a crash leaves
    assert fit(CONFIG, tmp_path) == 0
    assert any(line.startswith("resuming at step 5") for line in said)
    whole, parts = untimed(metrics(finished)), untimed(metrics(tmp_path))
    assert [line for line in parts if line["event"] == "train"] == [line for line in whole if line["event"] == "train"]
    assert parts[-1] == whole[-1]
    assert re.fullmatch("[0-9a-f]{16}", whole[-1]["params_fp"])


@pytest.mark.slow
def test_the_same_command_twice_gives_the_same_metrics(finished, tmp_path):
    fit(CONFIG, tmp_path)
    assert untimed(metrics(tmp_path)) == untimed(metrics(finished))


@pytest.mark.slow
def test_a_finished_run_repeated_changes_nothing(finished, said):
    def everything():
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(finished.rglob("*")) if p.is_file()}

    before = everything()
    assert fit(CONFIG, finished) == 0
    assert everything() == before
    assert said[-1] == "already trained for 6 steps, of train.steps = 6; nothing to do"


@pytest.mark.slow
def test_log_shows_epochs_and_predictions(finished):
    lines = metrics(finished)
    count = len(demo.examples("train"))
    assert [line["epoch"] for line in lines if line["event"] == "train"] == [step * 8 / count for step in range(1, 7)]
    dev = demo.examples("dev")
    for line in lines:
        if line["event"] == "evaluation":
            assert [(s["id"], tuple(s["gold"])) for s in line["samples"]] == [(e.id, e.targets) for e in dev[:3]]
            assert all(isinstance(text, str) for s in line["samples"] for text in s["predicted"])
            bounds = line["bounds"]  # the values of decoding, which may be narrower than the config's
            assert bounds["time_max"] <= CONFIG.grid.time_max and bounds["max_length"] <= CONFIG.decode.max_length
            assert bounds["sub_max"] == CONFIG.grid.sub_max  # the targets would allow for more


@pytest.mark.slow
def test_runs_are_compared_in_a_table(finished, tmp_path, capsys):
    assert compare_command.main([str(finished), str(finished), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    evaluations = [line for line in metrics(finished) if line["event"] == "evaluation"]
    best = max(evaluations, key=lambda line: (line["em_f1"], -line["dev_loss"]))
    assert rows[0] == rows[1] and (rows[0]["run"], rows[0]["step"]) == (str(finished), "6")
    assert (rows[0]["best at"], rows[0]["dev loss"]) == (str(best["step"]), f"{best['dev_loss']:.4f}")
    assert compare_command.main([str(finished)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[-4:] == ["best", "last", "steps", "minutes"]
    assert len(table) == 2 and len(table[1].split()) == len(log_summary.COLUMNS)
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be read \(No such file or directory\)"):
        compare_command.main([str(tmp_path / "absent")])


@pytest.mark.slow
def test_training_ends_after_evaluations_that_are_no_better(tmp_path, monkeypatch, capsys, said):
    """With this rate nothing is learned: the first evaluation is the best. It runs outside the main thread."""
    still = {"learning_rate": 1e-30, "dropout": 0.0}
    config = change(ON_ONE, train={"steps": 9, "evaluate_every": 1, "patience": 2, **still})
    codes = []
    thread = threading.Thread(target=lambda: codes.append(fit(config, tmp_path)))
    thread.start()
    thread.join()
    assert codes == [0] and said[-2] == "no better evaluation in train.patience = 2; training ends before train.steps"
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if line["event"] == "evaluation"] == [1, 2, 3]
    assert lines[-1]["event"] == "end"
    assert "training: compiling for sources of" in capsys.readouterr().err
    # The choices of the run are stored with it, and the same command ends at the same place.
    monkeypatch.setattr(loop, "choose_shapes", None)
    assert fit(config, tmp_path) == 0
    assert untimed(metrics(tmp_path)) == untimed(lines)
    assert fit(change(config, train={"patience": 0, "steps": 4, "shapes": 3}), tmp_path) == 0
    assert metrics(tmp_path)[-1]["step"] == 4


@pytest.mark.slow
def test_a_run_keeps_the_shapes_that_its_first_steps_chose(tmp_path, said):
    """More steps would choose more shapes, and other shapes would change the training."""
    config = change(ON_ONE, train={"steps": 1, "shapes": 9, "evaluate_examples": 8})
    assert fit(config, tmp_path) == 0
    line = "all batches are padded to one shape; a shape is compiled once, before its first step"
    assert f"{line}; a further shape would not save its time of compilation in 1 steps" in said
    said.clear()
    assert fit(change(config, train={"steps": 2}), tmp_path) == 0
    assert line in said
    kept = [checkpoint.Store(tmp_path / "checkpoints").describe(step).metadata["shapes"] for step in (1, 2)]
    assert kept[0] == kept[1] and len(kept[0]["pairs"]) == 1


@pytest.mark.parametrize(
    "step, count, shapes, told",
    [(0, 2, "2 shapes", True), (0, 9, "7 shapes (one of 4 at first)", False), (4, 2, "2 shapes", False)],
)
def test_number_of_shapes_is_logged_with_its_reason(said, step, count, shapes, told):
    """A resumed run logs no reason, because it keeps its shapes for any train.shapes."""
    run = mock.MagicMock(step=step, config=change(CONFIG, train={"shapes": 9, "steps": 30}))
    run.state.params, run.trainer.trained.return_value = {}, {}
    run.shapes = Shapes((8,), ((8, 8),) * count, (8, 8), (8.0, 8.0))
    loop.Run._log_model_and_batches(run, 406)
    line = f"batches are padded to one of {shapes}; a shape is compiled once, before its first step"
    why = "; a further shape would not save its time of compilation in 30 steps" if told else ""
    assert said[-1] == f"{line}{why}"


def test_evaluations_are_bounded_by_their_targets(tokenizer):
    examples = demo.examples("dev")[:50]
    wide = change(CONFIG, grid={"time_max": 5000, "sub_max": 300}, data={"max_target": 100})
    encoded = [encode_example(e, tokenizer, wide, MODEL) for e in examples]
    rows = [[len(tokenizer.encode(row)) for row in e.targets] for e in examples]
    steps = max(grid.pipelined_steps(x, delay=2, sub_max=300, time_max=5000) for x in rows)
    bounds = examiner.bound_decoding(wide, encoded).grid
    assert 1.5 * steps <= bounds.time_max < 2 * steps + 8 and bounds.sub_max == 1.5 * (max(map(len, rows)) + 1) // 1 + 8
    assert examiner.bound_decoding(CONFIG, encoded) == CONFIG  # never wider than requested
    cut = change(wide, data={"max_target": 4})  # does not depend on the lengths of answers
    assert examiner.bound_decoding(cut, [encode_example(e, tokenizer, cut, MODEL) for e in examples]) == cut
    joined = change(wide, train={"method": "sequential"}, decode={"max_length": 512})
    longest = max(len(tokenizer.encode(" ; ".join(e.targets))) + 1 for e in examples)
    bound = examiner.bound_decoding(
        joined, [encode_example(e, tokenizer, joined, MODEL) for e in examples]
    ).decode.max_length
    assert bound == longest + longest // 2 + 8


@pytest.mark.slow
def test_a_damaged_step_is_kept_aside_and_the_one_before_is_used(tmp_path, said):
    fit(CONFIG, tmp_path)
    for data in (tmp_path / "checkpoints/6/params").rglob("d/*"):
        data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))  # a change of one byte might have no effect
    said.clear()
    restored = checkpoint.open_run(tmp_path)
    assert restored.step == 3 and "checkpoints/6: damaged" in said[0]
    assert (tmp_path / "checkpoints/6").is_dir()  # reading changes nothing
    said.clear()
    assert fit(CONFIG, tmp_path) == 0
    assert "renamed to corrupt-6" in said[0] and said[1].startswith("resuming at step 3")
    assert (tmp_path / "checkpoints/corrupt-6").is_dir()
    assert checkpoint.open_run(tmp_path).step == 6


@pytest.mark.slow
def test_temporarily_unreadable_step_is_not_damaged(finished, monkeypatch):
    before = sorted(p.name for p in (finished / "checkpoints").iterdir())

    def too_many(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pipejax.checkpoint.arrays._open_arrays", too_many)
    with pytest.raises(
        UserError, match=r"checkpoints/6/params: cannot be read at the moment \(OSError: .*Too many open files\)"
    ):
        fit(change(CONFIG, train={"steps": 9}), finished)
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == before


def test_saving_a_step_again_replaces_the_old_step(tmp_path):
    store = checkpoint.Store(tmp_path / "best", keep=1, writable=True)
    config = dataclasses.replace(CONFIG, model=None)  # no T5 has such parameters
    for value in (1.0, 2.0):
        store.save(4, {"params": {"a": jax.numpy.full(3, value)}}, config=config, metadata={"score": [value]})
    assert store.close()
    restored = store.restore(4)
    assert restored.metadata == {"score": [2.0]} and restored.items["params"]["a"].tolist() == [2.0] * 3


@pytest.mark.slow
def test_logged_steps_are_at_most_one_interval_after_a_committed_step(tmp_path, monkeypatch):
    lost = []
    write = RunDirectory.log_metrics

    def watch(directory, values):
        committed = [int(path.name) for path in (directory.path / "checkpoints").glob("*") if path.name.isdigit()]
        if values["event"] == "train":
            lost.append(values["step"] - max(committed, default=0))
        write(directory, values)

    handler = orbax.checkpoint.PyTreeCheckpointHandler
    finish = handler.finalize

    def late(self, *args):
        time.sleep(0.3)  # longer than a step: a training that waits for no save would be far ahead
        return finish(self, *args)

    monkeypatch.setattr(handler, "finalize", late)
    monkeypatch.setattr(RunDirectory, "log_metrics", watch)
    config = change(CONFIG, train={"steps": 12, "checkpoint_every": 2, "evaluate_every": 12, "evaluate_examples": 1})
    assert fit(config, tmp_path / "run") == 0
    assert len(lost) == 12 and set(lost) == {1, 2}


@pytest.mark.slow
def test_other_training_examples_are_refused_on_resume(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    examples = demo.examples("train")[: 3 * 8]
    lines = [json.dumps({"id": e.id, "source": e.source, "targets": e.targets}) for e in examples]
    data = {"task": "jsonl", "train": str(tmp_path / "train.jsonl"), "tokenizer": str(tmp_path / "tokenizer")}
    config = change(CONFIG, data=data, train={"steps": 2})
    Path(data["train"]).write_text("\n".join(lines))
    assert fit(config, tmp_path / "run") == 0
    further = change(config, train={"steps": 3})
    other = lines[9].replace('"source": "', '"source": "the ')
    Path(data["train"]).write_text("\n".join([*lines[:9], other, *lines[10:]]))
    before = metrics(tmp_path / "run")
    with pytest.raises(UserError, match=r"data\.train: found examples that differ"):
        fit(further, tmp_path / "run")
    assert metrics(tmp_path / "run") == before
    Path(data["train"]).write_text("\n".join(lines))
    assert fit(further, tmp_path / "run") == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 3


@pytest.mark.slow
def test_interrupted_evaluation_is_repeated(tmp_path, monkeypatch):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pipejax.training.examiner.evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(change(CONFIG, train={"steps": 3}), tmp_path)
    fit(change(CONFIG, train={"steps": 3}), tmp_path)
    assert [line["step"] for line in metrics(tmp_path) if line["event"] == "evaluation"] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 6])
def test_evaluation_ended_by_a_signal_is_repeated_by_the_next_run(finished, tmp_path, monkeypatch, at):
    config, decode = change(CONFIG, decode={"batch_size": 4}), examiner.evaluate
    evaluations = []

    def signalled(*args, tick, **kwargs):
        evaluations.append(0)

        def ask(count):
            evaluations[-1] += count
            if len(evaluations) == at // 3:
                signal.raise_signal(signal.SIGTERM)
            tick(count)

        return decode(*args, tick=ask, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(examiner, "evaluate", signalled)
        assert fit(config, tmp_path) == 128 + signal.SIGTERM
    assert evaluations[-1] == 4  # of eight examples
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if line["event"] == "evaluation"] == [3][: at // 3 - 1]
    assert (lines[-1]["event"], lines[-1]["step"]) == ("stopped", at)
    assert checkpoint.open_run(tmp_path).step == at
    assert fit(config, tmp_path) == 0
    expected = untimed(metrics(finished))
    assert untimed(metrics(tmp_path)) == expected and [line["event"] for line in expected].count("evaluation") == 2
    assert checkpoint.open_run(tmp_path, best=True).step == checkpoint.open_run(finished, best=True).step
    before = metrics(tmp_path)
    assert fit(config, tmp_path) == 0 and metrics(tmp_path) == before


@pytest.mark.slow
def test_the_best_step_is_on_disk_before_its_evaluation_is_in_the_log(tmp_path, monkeypatch):
    config, save = change(CONFIG, train={"steps": 3}), checkpoint.Store.save

    def killed(self, *args, **kwargs):
        if self.directory.name == "best":
            raise KeyboardInterrupt
        return save(self, *args, **kwargs)

    def signalled(*args, tick, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        tick(1)

    with monkeypatch.context() as patch:
        patch.setattr(examiner, "evaluate", signalled)
        assert fit(config, tmp_path) == 128 + signal.SIGTERM
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Store, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(config, tmp_path)
    assert fit(config, tmp_path) == 0
    assert [line["event"] for line in metrics(tmp_path)] == ["train"] * 3 + ["evaluation", "end"]
    assert checkpoint.open_run(tmp_path, best=True).step == 3


@pytest.mark.slow
def test_too_many_beams_and_beams_with_rows_are_refused(finished, tmp_path):
    with pytest.raises(UserError, match=r"decode\.beams: found 3; expected 1, .*, not pipelined"):
        fit(change(CONFIG, decode={"beams": 3}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    config = change(CONFIG, train={"method": "sequential", "init_from": str(finished)}, decode={"beams": 33})
    with pytest.raises(UserError, match=r"decode\.beams: found 33; expected at most half of model\.vocab_size = 64"):
        fit(dataclasses.replace(config, model=None), tmp_path / "run")


def test_separator_lost_by_the_tokenizer_is_refused(tmp_path):
    with pytest.raises(
        UserError,
        match=r"data\.separator: found '\\n'",
    ):
        fit(change(CONFIG, train={"method": "sequential"}, data={"separator": "\n"}), tmp_path / "run")


@pytest.mark.slow
def test_key_that_affects_learning_cannot_change_on_resume(finished):
    with pytest.raises(UserError, match=r"grid.delay: 2 -> 3; expected no change on resume"):
        fit(change(CONFIG, grid={"delay": 3}), finished)
    with pytest.raises(UserError, match=rf"batch_size: 8 -> 16; .* its weights, .* with train\.init_from={finished}"):
        fit(change(CONFIG, train={"batch_size": 16}), finished)


@pytest.mark.slow
def test_the_number_of_dev_examples_may_change_on_resume(finished, said):
    config = dataclasses.replace(change(CONFIG, train={"evaluate_examples": 4}), name="another label")
    assert fit(config, finished) == 0
    assert any(line.startswith("train.evaluate_examples: found a different number") for line in said)


@pytest.mark.slow
def test_changed_length_of_the_warm_up_is_logged_on_resume(tmp_path, said):
    config = change(CONFIG, train={"steps": 2, "warmup_share": 0.9, "schedule": "constant"})
    assert fit(config, tmp_path) == 0 and fit(change(config, train={"steps": 4}), tmp_path) == 0
    assert fit(change(config, train={"steps": 4}), tmp_path) == 0
    found = [line for line in said if line.startswith("train.warmup_share")]
    assert found == ["train.warmup_share: the warm-up now ends at step 4 instead of 2"]


REFUSED = [
    ({"train": {"method": "none"}}, r"train\.method: found 'none'"),
    ({"train": {"batch_size": 6}, "mesh": {"data": 4}}, r"train\.batch_size: found 6; expected a multiple of 4"),
    ({"mesh": {"data": 16}}, r"mesh: found data x fsdp x tensor = 16; expected at most the 8 devices"),
    ({"mesh": {"tensor": 3}}, r"mesh: found fsdp x tensor = 3; expected a divisor of the 8 devices"),
    ({"model": {"vocab_size": 20}}, r"model\.vocab_size: found 20; expected at least \d+, the size of the tokenizer"),
    ({"data": {"task": "jsonl"}}, r"data\.train: found nothing"),
    ({"data": {"task": "jsonl", "train": "/nowhere.jsonl"}}, r"/nowhere\.jsonl: no such file"),
    ({"data": {"task": "nonsense"}}, r"data\.task: found 'nonsense'; expected one of demo, demo_long, jsonl"),
    ({"train": {"init_from": "/nowhere"}}, r"/nowhere: no such checkpoint directory"),
]


@pytest.mark.parametrize("sections, message", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_invalid_config_is_refused_before_anything_is_trained(sections, message, tmp_path):
    with pytest.raises(UserError, match=message):
        fit(change(CONFIG, **sections), tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_foreign_directories_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with refuses(tmp_path):
        fit(CONFIG, tmp_path)
    with pytest.raises(UserError, match="found a file"):
        fit(CONFIG, tmp_path / "thesis.tex")
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A Hugging Face model with a tokenizer, and the checkpoint converted from it."""
    root = tmp_path_factory.mktemp("converted")
    torch.manual_seed(5)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(HfConfig(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
    model.save_pretrained(root / "hf")
    demo.build_tokenizer(root / "hf")
    huggingface.from_hf(root / "hf", root / "ours")
    return model.eval(), root / "ours"


@pytest.mark.slow
def test_fine_tuning_a_converted_checkpoint(converted, tmp_path, said):
    """The first sequential loss equals torch's; the loss falls; the result is converted to Hugging Face."""
    model, ours = converted
    every = dict.fromkeys(("steps", "evaluate_every", "checkpoint_every"), 30)
    train = dataclasses.replace(CONFIG.train, method="sequential", dropout=0.0, init_from=str(ours), **every)
    own = {"data": DataConfig(task="demo"), "decode": DecodeConfig(max_length=8), "mesh": MeshConfig(data=1)}
    config = Config(name="fine", train=train, **own)
    assert fit(config, tmp_path / "run") == 0
    assert said[0] == f"starting from {ours} (step 0)"
    losses = [line["loss"] for line in metrics(tmp_path / "run") if line["event"] == "train"]

    tokenizer = Tokenizer.load(ours / "tokenizer")
    resolved = checkpoint.open_run(tmp_path / "run").config
    ids = TrainingBatches(demo.examples("train"), tokenizer, resolved, resolved.model)[0].ids
    batch = [next(e for e in demo.examples("train") if e.id == name) for name in ids]
    sources = [[*tokenizer.encode(e.source), 1] for e in batch]
    labels = [[*tokenizer.encode(" ; ".join(e.targets)), 1] for e in batch]

    def tensor(rows, filler):
        return torch.tensor([[*row, *[filler] * (max(map(len, rows)) - len(row))] for row in rows])

    mask = tensor([[1] * len(s) for s in sources], 0)
    with torch.no_grad():
        expected = model(input_ids=tensor(sources, 0), attention_mask=mask, labels=tensor(labels, -100)).loss.item()
    assert abs(losses[0] - expected) < 1e-4
    assert np.mean(losses[-5:]) < 0.8 * losses[0]

    huggingface.to_hf(tmp_path / "run", tmp_path / "back")
    back, report = T5ForConditionalGeneration.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert back(input_ids=tensor(sources, 0), attention_mask=mask, labels=tensor(labels, -100)).loss.item() < expected


def test_config_that_contradicts_its_initial_checkpoint_is_refused(converted, tmp_path):
    with pytest.raises(UserError, match=r"model\.d_model: found 16; expected 32 as in the checkpoint"):
        fit(change(CONFIG, train={"init_from": str(converted[1])}), tmp_path / "run")
    with pytest.raises(UserError, match=r"model: found none; expected"):
        fit(dataclasses.replace(CONFIG, model=None), tmp_path / "run")


@pytest.mark.parametrize(
    "number, code",
    [
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_signals_checkpoint_at_the_next_step(tmp_path, number, code):
    settings = {"steps": 10**5, "batch_size": 4, "log_every": 1, "checkpoint_every": 10**5, "evaluate_every": 10**5}
    command = [sys.executable, ROOT / "train.py", "--config", runs.prepare(tmp_path / "tiny")]
    command += ["--workdir", tmp_path / "run", *(f"--set=train.{key}={value}" for key, value in settings.items())]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run/metrics.jsonl"
    for _ in range(600):
        if log.is_file() and len(log.read_bytes().splitlines()) >= 3:
            break
        time.sleep(0.1)
    with pytest.raises(UserError, match="in use by another training process"):
        fit(CONFIG, tmp_path / "run")
    process.send_signal(number)
    said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == code
    step = int(re.search(r"stopped by SIG\w+ at step (\d+)", said[-1])[1])
    assert checkpoint.open_run(tmp_path / "run").step == step
    assert metrics(tmp_path / "run")[-1]["step"] == step


@pytest.mark.slow
def test_resolved_config_is_written_with_the_checkpoint(finished):
    written = config_lib.from_json((finished / "config.json").read_text(), where="config.json")
    resolved = change(CONFIG, train={"remat": "none"}, data={"special_tokens": "template"})  # from "auto"
    assert written == resolved == checkpoint.open_run(finished).config


def files_of(place):
    return {str(path.relative_to(place)): path.stat().st_mtime_ns for path in place.rglob("*")}


@pytest.mark.slow
def test_dry_run_makes_first_step_and_leaves_no_files(tmp_path, said, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert dry_run(change(CONFIG, train={"tensorboard": True}), tmp_path / "run") == 0
    assert list(tmp_path.iterdir()) == []
    words = " ".join(said)
    for expected in (
        "GiB on each device, estimated",
        "first batch: sources (8, ",
        "its first example, train-",
        "step 1: loss ",
    ):
        assert expected in words, expected


@pytest.mark.slow
def test_dry_run_raises_errors_of_the_run(finished, tmp_path, said):
    before = files_of(finished)
    with pytest.raises(UserError, match=r"train\.learning_rate: 0\.001 -> 0\.5; expected no change on resume"):
        dry_run(change(CONFIG, train={"learning_rate": 0.5}), finished)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    with refuses(tmp_path / "other"):
        dry_run(CONFIG, tmp_path / "other")
    with pytest.raises(UserError, match=r"data\.task"):
        dry_run(change(CONFIG, data={"task": "none"}), tmp_path / "new")
    assert files_of(finished) == before and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_dry_run_finds_answers_of_end_tokens_alone_empty_as_the_run_does(tokenizer_files, tokenizer, tmp_path):
    (end,) = tokenizer.encode("<pad>")
    data = tmp_path / "data.jsonl"
    data.write_text('{"source": "red apples", "targets": ["<pad>"]}\n' * 2)
    settings = {"task": "jsonl", "train": str(data), "tokenizer": str(tokenizer_files), "empty_targets": "refuse"}
    config = change(CONFIG, data=settings)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, other_eos_token_ids=(end,)))
    for begin in (dry_run, loop.fit):
        with pytest.raises(UserError, match="no answer"):
            begin(config, tmp_path / "run")


@pytest.mark.slow
def test_dry_run_does_not_change_existing_run(finished, said):
    before = files_of(finished)
    assert dry_run(CONFIG, finished) == 0
    assert files_of(finished) == before and any("the dry run starts a new one elsewhere" in line for line in said)


@pytest.mark.slow
def test_dry_run_reports_loss_that_is_not_finite(tmp_path, said, monkeypatch):
    make_step = loop.Run.make_step

    def poisoned(self):
        self.state = self.state.replace(params=jax.tree.map(lambda x: x * jnp.nan, self.state.params))
        make_step(self)

    monkeypatch.setattr(loop.Run, "make_step", poisoned)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert dry_run(CONFIG, tmp_path / "run") == 1 and not [*tmp_path.iterdir()]
    assert any("the loss or the gradient of the first step is not finite" in line for line in said)
