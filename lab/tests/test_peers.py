"""Peers: their protocol, tested with a fake peer, and the installed peers, compared with plain PyTorch."""

import dataclasses
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lab.benchmarks import decode, plot, systems
from lab.benchmarks.peers import llama, process
from lab.benchmarks.peers.process import PEERS, Process, peer
from lab.benchmarks.peers.vocabulary import ids_of, words_of
from lab.benchmarks.systems import SIZES, Run, random_params, write
from pipejax.system.errors import UserError

SOURCE = np.random.default_rng(0).integers(3, 500, (2, 20), np.int32)
FAKE = """
import sys, threading
sys.path.insert(0, ".")
from lab.benchmarks.peers.worker import Answer, serve

def wait_busily():
    while True:
        pass

class Fake:
    def __init__(self, name):
        if name == "broken":
            raise ValueError("no\\nmodel")
        print("a library that prints")
        if name == "busy":
            threading.Thread(target=wait_busily, daemon=True).start()
        self.name = name

    def run(self, source, lengths):
        print("and prints")
        if self.name == "dies":
            sys.exit("no memory")
        if self.name == "fails":
            raise KeyError("batch")
        return Answer(0.25, len(source), [[ids[0]] * (n + (self.name == "long")) for ids, n in zip(source, lengths)])

serve(lambda flags: Fake(flags.name), "numpy")
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts a fake peer with a name."""
    (tmp_path / "fake.py").write_text(FAKE)
    started = []

    def begin(name, **more):
        found = Process(name, [sys.executable, str(tmp_path / "fake.py"), name, "."], tmp_path / f"{name}.log", **more)
        started.append(found)
        return found

    yield begin
    for each in started:
        each.close()
        assert each.process.returncode is not None


def test_a_peer_answers_batches(start):
    fake = start("fake")
    assert fake.versions == {"numpy": np.__version__}
    assert fake.run(SOURCE, [[1, 2], [4]]) == Run(0.25, 2.0) and fake.steps([[1, 2], [4]]) == 5
    assert fake.answer([[7, 8], [9, 9]], [2, 1])["tokens"] == [[7, 7], [9]]
    assert "and prints" in fake.log.read_text()


def test_a_peer_without_batches_answers_the_first_example(start):
    fake = start("fake", batches=False)
    assert fake.run(SOURCE, [[1, 2], [1, 2]]) == Run(0.5, 2.0)
    summary = decode.summary("2x1", fake, [[1, 2], [1, 2]], [Run(0.5, 2.0)])
    assert summary["one_by_one"] and "one_by_one" not in decode.summary("2x1", fake, [[1]], [Run(0.5, 2.0)])


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("long", AssertionError, r"answers of \[6, 6\] tokens, not \[5, 5\]"),
        ("fails", RuntimeError, "KeyError: 'batch'"),
        ("dies", RuntimeError, r"the process ended \(no memory\)"),
    ],
)
def test_failing_peer_reports_the_reason(start, name, error, words):
    with pytest.raises(error, match=words):
        start(name).run(SOURCE, [[1, 2], [4]])


def test_peer_that_does_not_load_reports_the_reason(start):
    with pytest.raises(RuntimeError, match=r"^ValueError: no model$"):
        start("broken")


def test_peer_uses_no_cpu_between_its_turns(start):
    busy = start("busy")
    busy.run(SOURCE, [[1], [1]])

    def used():
        fields = Path(f"/proc/{busy.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12]), fields[0]

    time.sleep(0.1)
    before = used()
    time.sleep(0.3)
    assert used() == before and before[1] == "T"


def test_a_slow_system_has_fewer_turns():
    class Fake:
        def __init__(self, name, seconds):
            self.name, self.seconds, self.turns = name, seconds, 0

        def run(self, source, rows):
            self.turns += 1
            return Run(1.0, self.seconds)

    fast, slow = Fake("fast", 1.0), Fake("slow", 9.0)
    runs = systems.interleaved([fast, slow], SOURCE, [[1]], 4, lambda: None, enough=15.0)
    assert [len(runs[name]) for name in ("fast", "slow")] == [4, 2] and (fast.turns, slow.turns) == (5, 3)
    assert systems.paired(runs["fast"], runs["slow"], whole=True) == 5.0


def test_words_of_ids_are_unique_and_invertible():
    assert words_of([0, 1, 2, 3, 40]) == ["<pad>", "</s>", "<unk>", "t3", "t40"]
    assert ids_of(words_of(range(9))) == [*range(9)]


@pytest.mark.parametrize(
    ("parameter", "name"),
    [
        ("shared.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("encoder.final_layer_norm.weight", "enc.output_norm.weight"),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "enc.blk.0.attn_rel_b.weight"),
        ("encoder.block.11.layer.1.layer_norm.weight", "enc.blk.11.ffn_norm.weight"),
        ("encoder.block.2.layer.1.DenseReluDense.wi.weight", "enc.blk.2.ffn_up.weight"),
        ("decoder.block.2.layer.2.DenseReluDense.wi_0.weight", "dec.blk.2.ffn_gate.weight"),
        ("decoder.block.2.layer.2.DenseReluDense.wo.weight", "dec.blk.2.ffn_down.weight"),
        ("decoder.block.3.layer.1.EncDecAttention.q.weight", "dec.blk.3.cross_attn_q.weight"),
        ("decoder.block.3.layer.1.layer_norm.weight", "dec.blk.3.cross_attn_norm.weight"),
        ("decoder.block.3.layer.0.SelfAttention.o.weight", "dec.blk.3.attn_o.weight"),
    ],
)
def test_names_of_a_gguf_file(parameter, name):
    assert llama.name_of(parameter) == name


# Installed peers.


V1_1 = dataclasses.replace(SIZES["tiny"], feed_forward="gated-gelu", tied_head=False)


@pytest.fixture(scope="module", params=[SIZES["tiny"], V1_1], ids=["v1.0", "v1.1"])
def directory(request, tmp_path_factory):
    """A Hugging Face model whose embedding is so small that it alone does not determine the next token."""
    params = random_params(request.param)
    params["shared"]["embedding"] *= 0.3
    return write(request.param, params, tmp_path_factory.mktemp("model"))


def greedy(directory, source, length):
    """Greedy tokens by PyTorch without a cache and without eos."""
    import torch
    from transformers import T5ForConditionalGeneration

    model = T5ForConditionalGeneration.from_pretrained(directory).eval()
    found = torch.zeros(len(source), 1, dtype=torch.long)
    with torch.inference_mode():
        for _ in range(length):
            logits = model(input_ids=torch.tensor(source).long(), decoder_input_ids=found).logits[:, -1]
            logits[:, 1] = -torch.inf
            found = torch.cat([found, logits.argmax(-1, keepdim=True)], -1)
    return found[:, 1:].tolist()


QUICK = ("hf", "openvino-fp32", "llama-int8")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in PEERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_pytorch(name, directory):
    """All tokens are equal in float32; with weights in fewer bytes, the first tokens of most sources."""
    environment = PEERS[name].environment
    if environment and process.python_of(name) == sys.executable:
        pytest.skip(f"make venv-peers builds the environment {environment}")
    source = np.random.default_rng(2).integers(3, 500, (16, 20)).tolist()
    expected = greedy(directory, source, 9)
    with peer(name, directory, threads=1) as system:
        found = system.answer(source, [9] * 16)["tokens"]
    if name.endswith("fp32") or name in ("hf", "hf-compiled"):
        assert [row[:8] for row in found] == [row[:8] for row in expected]
    else:
        assert sum(a[0] == b[0] for a, b in zip(found, expected, strict=True)) >= 12


@pytest.mark.slow
def test_command_leaves_out_missing_peers(tmp_path, monkeypatch, capsys):
    """A peer whose library is not installed is left out with a warning."""
    monkeypatch.setattr(decode, "use_threads", lambda count: None)
    monkeypatch.setattr(process, "ENVIRONMENTS", tmp_path)
    out = tmp_path / "speed.json"
    shape = ["--model", "tiny", "--patterns", "3x4", "--source", "20", "--rounds", "1", "--batch", "1,2"]
    assert decode.main([*shape, "--peers", "hf,openvino-int8", "--json", str(out)]) == 1
    found = plot.read(str(out))
    assert [f["system"] for f in found["failures"]] == ["openvino-int8"] and "optimum" in found["failures"][0]["error"]
    assert [(r["batch"], r["steps"]) for r in found["results"] if r["system"] == "hf"] == [(1, 15), (2, 15)]
    assert found["machine"]["versions"].keys() == {"jax", "torch", "transformers"}
    assert "warning: openvino-int8 is left out" in capsys.readouterr().err


# Pictures.


def result(system, pattern="8x14", batch=1, encode=1.0, decode=1.0):
    return {"system": system, "pattern": pattern, "batch": batch, "steps": 9, "encode_s": encode, "decode_s": decode}


def test_picture_has_each_system_once_with_the_fastest_first():
    found = [result("ct2-fp32"), result("pipejax-pipelined", decode=0.5), result("ct2-int8", decode=0.1)]
    assert [r["system"] for r in plot.fastest(found)] == ["ct2-int8", "pipejax-pipelined"]


def test_a_picture_of_some_answers(tmp_path):
    found = [result("hf"), result("hf", "5x4"), result("hf", batch=8)]
    assert plot.chosen(found, "", 0) == [found[0], found[2], found[1]]
    assert plot.chosen(found, "5x4,8x14", 1) == [found[1], found[0]]
    with pytest.raises(UserError, match="found no such results"):
        plot.chosen(found, "7x40", 0)
    found += [result("ct2-int8"), result("llama-int8", decode=99.0)]
    systems.save(str(tmp_path / "a.json"), {"results": found})
    assert plot.main([str(tmp_path / "a.json"), "--output", str(tmp_path / "a.svg")]) == 0
    assert os.path.getsize(tmp_path / "a.svg") and "bar cut" in (tmp_path / "a.svg").read_text()
