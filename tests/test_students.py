"""The small T5 of the drafter `model` that shares the encoder of the large one, and its training."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax
from pipejax import checkpoint
from pipejax.apps import demo
from pipejax.apps.teach import students, teach_command
from pipejax.checkpoint.fingerprint import encoder_digest
from pipejax.checkpoint.student import STUDENT, shared_encoder
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, MeshConfig, TrainConfig
from pipejax.convert import huggingface
from pipejax.convert.quantized import quantize
from pipejax.decoding import Drafts, Pipelined, Sequential, Sizes, with_drafts
from pipejax.decoding.drafters import FromModel
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.programs import encode_batch
from pipejax.kernels import cpu_kernel
from pipejax.kernels.backends import OwnKernel
from pipejax.model.sharding import path_of
from pipejax.system.errors import UserError
from pipejax.training import loop
from support import oracle
from support.batches import padded, rows_of, sources
from support.one_program import compiled
from support.refusals import refuses
from support.tiny import DEEP, FEW_WORDS, IN_BLOCKS, MODEL, metrics

pytestmark = pytest.mark.usefixtures("compiled_once")


def noisy(params: Any, rng: np.random.Generator, noise: float) -> Any:
    """The parameters with noise in the decoder."""

    def changed(x: Any) -> Any:
        return (x + noise * np.std(x) * rng.standard_normal(x.shape)).astype(np.float32)

    return {**params, "decoder": jax.tree.map(changed, params["decoder"])}


# The memory of the small T5.


def check_memory(backend: Any) -> None:
    """Compares the memory from the outputs of the encoder with the memory from the sources."""
    rng = np.random.default_rng(2)
    params, texts = oracle.random_params(IN_BLOCKS, rng), sources(rng, 3, IN_BLOCKS.vocab_size)
    model, (ids, length) = IN_BLOCKS.module(), [jnp.asarray(x) for x in padded(texts)]
    ready = backend.prepare(model, jax.tree.map(jnp.asarray, params))
    expected: Any = encode_batch(model, ready.encoding, ids, length, backend=backend, outputs=True)
    found = backend.memorize(model, backend.projections(ready.encoding), expected.encoded, length)
    pairs = zip(*(jax.tree.leaves((x.keys, x.values, x.mask)) for x in (found, expected)), strict=True)
    for own, other in pairs:
        assert own.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("backend", [Backend(), XLA], ids=["layers", "XLA"])
def test_memory_from_outputs_equals_memory_from_sources(backend: Any) -> None:
    check_memory(backend)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["auto", "bfloat16", "int8"])
def test_memory_of_the_kernel_equals_memory_from_sources(kernel: cpu_kernel.Level, weights: str) -> None:
    check_memory(OwnKernel(weights, kernel))


# Drafts.

FEW = dataclasses.replace(FEW_WORDS, num_decoder_layers=3)
MODELS = 63  # random models of each setting: more than 500 in all settings


@pytest.mark.parametrize(
    "delay, time_max, sub_max, literal, batch",
    [
        pytest.param(1, 12, 5, False, 4, marks=pytest.mark.slow),
        *(
            pytest.param(*setting, marks=pytest.mark.long)
            for setting in (
                (1, 12, 5, True, 1),
                (2, 15, 6, False, 5),
                (2, 9, 4, True, 1),
                (3, 14, 4, False, 6),
                (3, 16, 20, True, 3),
                (None, 14, 1, False, 6),
                (None, 30, 1, False, 1),
            )
        ),
    ],
)
def test_answers_with_a_shared_encoder_equal_undrafted_answers(delay, time_max, sub_max, literal, batch):
    """Some small T5s are nearly always correct, and others seldom."""
    plain: Any = Sequential(max_length=time_max)
    if delay is not None:
        plain = Pipelined(delay=delay, time_max=time_max, sub_max=sub_max, literal=literal)
    drafted = with_drafts(plain, Drafts(FromModel(least=0.2), 4, query_counts=(batch + 2,)))
    sizes = Sizes.fit(drafted, batch, query_counts=drafted.queries, slots=(drafted.most_queries + 3,))
    small = dataclasses.replace(FEW, num_decoder_layers=2)
    without, program = compiled(FEW, plain), compiled(FEW, drafted, sizes, small=small, shares_encoder=True)
    saved = 0
    for seed in range(MODELS):
        rng = np.random.default_rng([seed, delay or 0, time_max])
        params, (ids, length) = oracle.random_params(FEW, rng), padded(sources(rng, batch, FEW.vocab_size))
        own = noisy(students.initial_params(params, (0, 2)), rng, seed % 3 / 3)
        expected = jax.device_get(without(params, ids, length))
        found = jax.device_get(program(params, ids, length, own))
        for b in range(batch):
            assert rows_of(found, b)[: len(expected.lengths[b])] == rows_of(expected, b)
        assert found.steps.tolist() == expected.steps.tolist()
        assert found.truncated.tolist() == expected.truncated.tolist()
        calls = plain.calls(expected)
        assert (found.calls <= calls).all()
        saved += (calls - found.calls).sum()
    assert saved > 0


# The training.

SETTINGS = (
    *("train.steps=4", "train.warmup_steps=0", "train.log_every=1", "train.evaluate_every=2"),
    *("train.checkpoint_every=2", "train.batch_size=8", "train.shapes=2", "train.length_group=2"),
)
LARGE = Config(
    name="large",
    model=DEEP,
    grid=GridConfig(time_max=10, sub_max=4),
    data=DataConfig(task="demo", separator=" ; "),
    train=TrainConfig(method="pipelined", steps=30),
    decode=DecodeConfig(max_length=16, draft_tokens=3),
    mesh=MeshConfig(data=1),
)


@pytest.fixture(scope="module")
def given(tmp_path_factory, tokenizer_files):
    """Random weights as a trained run, and a file of 30 sources."""
    root = tmp_path_factory.mktemp("given")
    params = oracle.random_params(DEEP, np.random.default_rng(32))  # most of its answers end
    params["shared"]["embedding"][1] *= 2
    checkpoint.save_params(root / "large", LARGE, params, tokenizer_source=tokenizer_files)
    lines = [json.dumps({"id": e.id, "source": e.source}) + "\n" for e in demo.examples("train")[:30]]
    (root / "sources.jsonl").write_text("".join(lines))
    return root


def run(given, workdir, *overrides, student="1", source=None, held_out=6):
    source = str(given / "sources.jsonl") if source is None else source
    settings = {"held_out": held_out, "overrides": [*SETTINGS, *overrides]}
    return students.teach_student(str(given / "large"), student, source, workdir, **settings)


@pytest.fixture(scope="module")
def taught(given, tmp_path_factory, compiled_once):
    workdir = tmp_path_factory.mktemp("runs") / "taught"
    assert run(given, workdir) == 0
    return workdir


@pytest.mark.slow
def test_a_student_is_a_run_that_drafts(given, taught):
    """It has the unchanged encoder of the large T5, and its drafts change no answer."""
    large, small = (checkpoint.open_run(path) for path in (given / "large", taught))
    assert encoder_digest(small.arrays["params"]) == encoder_digest(large.arrays["params"])
    assert small.config.model == dataclasses.replace(DEEP, num_decoder_layers=1)
    assert (small.config.train.method, small.config.grid) == ("pipelined", LARGE.grid)
    stated = json.loads((taught / STUDENT).read_text())
    assert stated["encoder_fp"] == encoder_digest(large.arrays["params"]) and stated["decoder_layers"] == [0]
    texts = [json.loads(line) for line in (given / "sources.jsonl").read_text().splitlines()]
    labels = [json.loads(line) for line in (taught / "labels" / "answers.jsonl").read_text().splitlines()]
    overrides = {"decode.draft": "model", "decode.draft_checkpoint": str(taught)}
    drafted = pipejax.load(given / "large", overrides=overrides).decode(texts)
    assert pipejax.load(given / "large").decode(texts) == labels
    assert [{**record, "calls": 0} for record in drafted] == [{**record, "calls": 0} for record in labels]
    found = json.loads((taught / students.FIGURES).read_text())
    assert found["equal_answers"] == 100 and found["calls"]["model"] <= found["calls"]["none"]
    assert found["labels"]["train"] + found["labels"]["held_out"] + found["labels"]["truncated"] == 30
    assert (found["step"], found["examples"]) == (4, found["labels"]["held_out"])


@pytest.mark.slow
def test_a_student_of_another_model_is_refused(given, taught, tmp_path, tokenizer_files):
    params = oracle.random_params(DEEP, np.random.default_rng(8))
    checkpoint.save_params(tmp_path / "other", LARGE, params, tokenizer_source=tokenizer_files)
    overrides = {"decode.draft": "model", "decode.draft_checkpoint": str(taught)}
    with refuses(f"decode.draft_checkpoint: {taught}", found="a T5 that shares the encoder"):
        pipejax.load(tmp_path / "other", overrides=overrides)
    shutil.copytree(taught, tmp_path / "damaged")
    (tmp_path / "damaged" / STUDENT).write_text("{}")
    with refuses(tmp_path / "damaged" / STUDENT):
        pipejax.load(given / "large", overrides={**overrides, "decode.draft_checkpoint": str(tmp_path / "damaged")})


@pytest.mark.slow
def test_a_converted_student_has_its_own_encoder(given, taught, tmp_path, capsys):
    """One line reports it."""
    quantize(taught, tmp_path / "int8")
    huggingface.to_hf(taught, tmp_path / "hf")
    lines = [line for line in capsys.readouterr().err.splitlines() if STUDENT in line]
    assert len(lines) == 2 and all(f"{taught}: {STUDENT} is not converted" in line for line in lines)
    assert shared_encoder(taught) and not shared_encoder(tmp_path / "int8")


@pytest.mark.slow
def test_another_student_in_the_same_directory_is_refused(given, taught):
    before = (taught / STUDENT).read_bytes()
    with refuses("--student", found="another small T5"):
        run(given, taught, student="2")
    assert (taught / STUDENT).read_bytes() == before


@pytest.mark.slow
def test_the_default_sources_are_the_training_examples(given, tmp_path, monkeypatch):
    """At most as many are read as the training and the measurement use."""
    monkeypatch.setattr(students, "fit", lambda *given, **more: 5)
    assert run(given, tmp_path / "run", source="", held_out=8) == 5
    lines = (tmp_path / "run" / "labels" / "sources.jsonl").read_text().splitlines()
    known = {e.id: e.source for e in demo.examples("train")}
    assert len(lines) == 4 * 8 + 8
    assert all(known[one["id"]] == one["source"] for one in map(json.loads, lines))


class _Killed(BaseException):
    pass


@pytest.mark.long
@pytest.mark.parametrize(
    "where, name, count", [(students, "save_initial", 1), (loop.Run, "make_step", 4), (students, "measure", 1)]
)
def test_killed_run_ends_like_an_uninterrupted_run(given, taught, tmp_path, monkeypatch, where, name, count):
    calls, call = [], getattr(where, name)

    def until(*args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        if len(calls) == count:
            raise _Killed
        return call(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(where, name, until)
        run(given, tmp_path / "run")
    assert run(given, tmp_path / "run") == 0
    for path in (students.FIGURES, "labels/answers.jsonl", STUDENT):
        assert (tmp_path / "run" / path).read_bytes() == (taught / path).read_bytes()
    ends = [metrics(path)[-1]["params_fp"] for path in (tmp_path / "run", taught)]
    assert ends[0] == ends[1]


@pytest.mark.long
def test_the_answers_of_a_sequential_model_are_learned(given, tmp_path):
    config = dataclasses.replace(LARGE, train=dataclasses.replace(LARGE.train, method="sequential"))
    large = checkpoint.open_run(given / "large")
    params, files = large.items["params"], large.tokenizer_files()
    checkpoint.save_params(tmp_path / "large", config, params, tokenizer_source=files)
    assert run(tmp_path, tmp_path / "run", source=str(given / "sources.jsonl")) == 0
    assert checkpoint.open_run(tmp_path / "run").config.train.method == "sequential"
    found = json.loads((tmp_path / "run" / students.FIGURES).read_text())
    assert found["equal_answers"] == 100 and found["calls"]["model"] <= found["calls"]["none"]


@pytest.mark.long
def test_a_small_t5_of_other_sizes_has_its_own_encoder(given, tmp_path):
    """The sizes come from a config, and then from the checkpoint of this training."""
    model = dataclasses.replace(MODEL, d_model=12, num_heads=3)
    file = tmp_path / "small.py"
    file.write_text(f"""from pipejax.config import Config, T5Config, TrainConfig
config = Config(model={model!r}, train=TrainConfig(steps=30, dropout=0.25))
""")
    assert run(given, tmp_path / "small", student=str(file)) == 0
    small = checkpoint.open_run(tmp_path / "small").config
    assert (small.model, small.train.dropout, small.train.freeze) == (model, 0.25, "none")
    assert json.loads((tmp_path / "small" / STUDENT).read_text())["encoder_fp"] == ""
    assert json.loads((tmp_path / "small" / students.FIGURES).read_text())["equal_answers"] == 100
    assert run(given, tmp_path / "more", student=str(tmp_path / "small")) == 0
    assert checkpoint.open_run(tmp_path / "more").config.train.init_from == str(tmp_path / "small")


def test_layers_are_chosen_at_even_distances():
    chosen = [students.spaced_layers(count, 12) for count in (1, 2, 3, 4, 12)]
    assert chosen == [(0,), (0, 11), (0, 6, 11), (0, 4, 7, 11), tuple(range(12))]
    params = oracle.random_params(DEEP, np.random.default_rng(1))
    small = students.initial_params(params, (0, 2))
    assert small["encoder"] is params["encoder"] and small["shared"] is params["shared"]
    assert small["decoder"]["layers_1"] is params["decoder"]["layers_2"]
    wanted = dataclasses.replace(DEEP, num_decoder_layers=2).tensors()
    assert {path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(small)} == wanted.keys()


@pytest.mark.parametrize(
    "student, place, found",
    [
        ("0", "--student 0", "0 decoder layers"),
        ("3", "--student 3", "3 decoder layers"),
        ("absent", "--student", "absent"),
        ("words.py", "--student words.py", "a T5 with vocab_size = 65"),
        ("empty.py", "--student empty.py: model", "none"),
    ],
)
def test_unsuitable_students_are_refused(given, tmp_path, monkeypatch, student, place, found):
    monkeypatch.chdir(tmp_path)
    made = "from pipejax.config import Config, T5Config\nconfig = Config("
    (tmp_path / "words.py").write_text(f"{made}model={dataclasses.replace(MODEL, vocab_size=65)!r})\n")
    (tmp_path / "empty.py").write_text(f"{made})\n")
    with refuses(place, found=found):
        run(given, tmp_path / "run", student=student)
    assert not (tmp_path / "run").exists()


def test_unsuitable_settings_are_refused(given, tmp_path):
    with refuses("train.freeze", found="none"):
        run(given, tmp_path / "run", "train.freeze=none")
    with pytest.raises(UserError, match=r"^--set: data\.train cannot be changed when rows are taught"):
        run(given, tmp_path / "run", "data.train=x.jsonl")
    with pytest.raises(UserError, match=r"^--input: found none; expected a file of sources"):
        teach_command.main(["--checkpoint", "x", "--workdir", "y"])
