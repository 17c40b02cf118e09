"""Benchmarks: every system does the requested work, and the results are written as documented."""

import json

import jax
import numpy as np
import pytest

from lab.benchmarks import apps, decode, documents, drafts, plot, serve, streams, systems, trees
from lab.benchmarks.peers.hugging_face import HuggingFace
from lab.benchmarks.peers.process import check_lengths
from lab.benchmarks.systems import SIZES, Run, build, paired, random_params, write
from pipejax import checkpoint
from pipejax.apps import demo
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding import Pipelined, Sequential
from pipejax.inference.generator import Generator
from pipejax.system.errors import UserError
from support import oracle
from support.tiny import MORE_WORDS

SOURCE = np.random.default_rng(0).integers(3, 500, (2, 20), np.int32)


@pytest.fixture(scope="module")
def params():
    return random_params(SIZES["tiny"])


@pytest.fixture(autouse=True)
def all_processors(monkeypatch):
    """Prevents benchmarks from changing the threads of the test process."""
    for command in (decode, documents, drafts, serve, streams):
        monkeypatch.setattr(command, "use_threads", lambda count: None)


@pytest.mark.parametrize(
    "text, rows",
    [("8x14", [14] * 8), ("1x3", [3]), ("8x14u", [13] * 4 + [21] + [13] * 3), ("5x4u", [4, 4, 6, 3, 3]), ("1x3u", [3])],
)
def test_pattern_gives_the_lengths_of_rows(text, rows):
    assert decode.rows_of(text) == rows
    assert sum(rows) == sum(decode.rows_of(text.removesuffix("u")))


@pytest.mark.parametrize("text", ["", "8", "0x3", "3x0", "8x14v", "-1x2", "8 x 14"])
def test_invalid_patterns_are_refused(text):
    with pytest.raises(UserError, match="expected such as 8x14"):
        decode.rows_of(text)


@pytest.mark.slow
def test_pipejax_systems_decode_rows_of_the_requested_lengths(params):
    strategies = {"grid": Pipelined(2, 30, 6), "chain": Sequential(40)}
    rows = [[3, 1, 5], [7]]
    grid, chain = build(SIZES["tiny"], params, "float32", strategies=strategies)
    for system in (grid, chain):
        memory = system.decoder.encode(SOURCE, np.asarray([20, 11]))
        decoded = system.decoder.decode(memory, rows)
        assert not (decoded.tokens[0, 0, : decoded.lengths[0, 0]] == 1).any()
        assert system.run(SOURCE, rows).decode_s > 0
    assert grid.steps(rows) == max(oracle.pipelined_steps(r, 2, 6, 30) for r in rows)
    assert chain.steps(rows) == 3 + 1 + 5 + 2 + 1
    with pytest.raises(AssertionError, match="lengths"):
        grid.decoder.decode(memory, [[40], [1]])  # more than 30 steps can hold


@pytest.mark.parametrize("name", ["hf", "hf-bf16", "hf-int8"])
def test_hugging_face_decodes_answers_of_the_requested_lengths(name, params, tmp_path):
    system = HuggingFace(name, write(SIZES["tiny"], params, tmp_path), threads=1)
    found = system.run(SOURCE.tolist(), [6, 5])
    assert [row.index(1) for row in found.tokens] == [5, 4] and found.encode_s > 0
    with pytest.raises(AssertionError, match="answers of"):
        check_lengths([[1, 2]], [3])


def test_systems_take_turns():
    order = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def run(self, source, rows):
            order.append(self.name)
            return Run(1.0, float(len(order)))

    runs = systems.interleaved([Fake("a"), Fake("b"), Fake("c")], SOURCE, [[1]], 2, lambda: None)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert [r.decode_s for r in runs["a"]] == [6.0, 8.0]  # the first round does not count
    assert paired([Run(1, 2), Run(1, 4)], [Run(1, 4), Run(1, 20)], whole=False) == 3.5
    assert paired([Run(1, 2), Run(1, 4)], [Run(2, 4), Run(1, 19)], whole=True) == 3.0


@pytest.mark.slow
def test_decode_command_writes_results_and_refuses_invalid_flags(tmp_path, capsys):
    out = tmp_path / "speed.json"
    flags = [
        "--model",
        "tiny",
        "--patterns",
        "3x4",
        "--source",
        "20",
        "--rounds",
        "1",
        "--sub-max",
        "9,14",
        "--time-max",
        "40,50",
    ]
    assert decode.main([*flags, "--json", str(out)]) == 0
    assert "with encoder" in capsys.readouterr().out
    found = json.loads(out.read_text())
    names = ["pipejax-pipelined", "pipejax-sequential", "pipejax-pipelined-14x50"]
    assert [(r["pattern"], r["system"], r["steps"]) for r in found["results"]] == [
        ("3x4", name, steps) for name, steps in zip(names, (7, 15, 7), strict=True)
    ]
    assert all(r["decode_s"] > 0 and r["encode_s"] > 0 for r in found["results"])
    assert found["machine"]["threads"] == 2
    for flags, words in (
        (["--peers", "hg"], "found hg; expected hf"),
        (["--patterns", "30x2"], "more than a grid of 20 x 64"),
        (["--sub-max", "9,x"], "expected whole numbers"),
        (["--sub-max", "9,14", "--time-max", "9,9,9"], "expected one value, or as many values as --sub-max"),
    ):
        with pytest.raises(UserError, match=words):
            decode.main(["--model", "tiny", *flags])
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(UserError, match=r"not a file that lab\.benchmarks\.decode or"):
        plot.main([str(tmp_path / "bad.json"), "--output", str(tmp_path / "x.svg")])


@pytest.mark.slow
def test_forced_generator_writes_rows_of_the_given_lengths(params):
    """The generator uses a strategy that the engine treats as the pipelined one."""
    config = Config(model=SIZES["tiny"], train=TrainConfig(method="pipelined"))
    generator = Generator(config, params, None)
    for rows in ([3, 1, 5], [7]):
        apps.force(generator, rows, GridConfig(delay=1, sub_max=6, time_max=12))
        assert isinstance(generator.make_strategy("pipelined"), Pipelined)
        for record in generator.decode(SOURCE.tolist()):
            assert [len(row) for row in record["row_ids"]] == rows
            assert record["steps"] == oracle.pipelined_steps(rows, 1, 6, 12)


def test_rates_and_waits_of_a_server_are_computed():
    Reply, offline = serve.Reply, serve.Offline("offline", None, [], [])
    replies = [Reply(10.0, 10.1, 10.2, 11.0), Reply(10.0, 10.3, 10.4, 12.0), Reply(11.0, 11.1, 11.2, 14.0)]
    assert serve.rate(replies) == 3 / 4
    slower = [Reply(0.0, 6.0, 6.0, 6.0), Reply(0.0, 6.0, 6.0, 6.0)]
    found = serve.summary(offline, 2, [replies, slower, slower])
    assert (found["requests"], found["requests_per_s"], found["end"]["p50_ms"]) == (7, 1 / 3, 6000)
    assert serve.summary(offline, 2, [replies])["row"]["p50_ms"] == pytest.approx(200, abs=1e-6)
    served = {("pipejax", 1): [replies], ("offline", 1): [slower], ("hf", 1): [[Reply(0.0, 8.0, 8.0, 8.0)]]}
    assert serve.verdicts(served, [1], [""], ["hf"]) == [
        "pipejax, 1 at a time: answers a second are 2.25 x offline, 6.00 x hf",
        "pipejax, alone: -4000.0 ms more than offline at p50",
    ]


@pytest.mark.long
def test_a_server_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIPEJAX_NATIVE", "off")
    flags = ["--model", "tiny", "--answer", "3x4", "--source", "20", "--rounds", "1", "--seconds", "1"]
    flags += ["--sub-max", "5", "--time-max", "8"]
    assert serve.main([*flags, "--concurrency", "2", "--json", str(tmp_path / "found.json")]) == 0
    assert "pipejax, 2 at a time" in capsys.readouterr().out
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    names = ["pipejax", "pipejax-stream", "offline"]
    assert [(r["system"], r["concurrency"]) for r in results] == [(name, 2) for name in names]
    for r in results:
        assert r["requests"] >= r["concurrency"] and r["requests_per_s"] > 0
        assert 0 < r["token"]["p50_ms"] <= r["row"]["p50_ms"] <= r["end"]["p50_ms"] <= r["end"]["p99_ms"]


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--peers", "hg"], "found hg; expected hf"),
        (["--weights", "int4"], "found int4; expected float32"),
        (["--answer", "30x2"], "more than a grid of 20 x 64"),
        (["--concurrency", "0"], "expected whole numbers"),
    ],
)
def test_invalid_server_flags_are_refused(flags, said):
    with pytest.raises(UserError, match=said):
        serve.main(["--model", "tiny", *flags])


@pytest.mark.slow
def test_a_server_that_does_not_start(tmp_path):
    command, said = (
        ["lab.benchmarks.apps", "nobody", "nowhere"],
        r"lab\.benchmarks\.apps nobody: the server did not start \(",
    )
    with pytest.raises(UserError, match=said), serve.server(command, tmp_path / "log"):
        pass


@pytest.mark.slow
def test_documents_are_decoded_from_text_to_text(tmp_path, tokenizer_files, capsys):
    """The systems take turns; an answer with another length than the targets is an error."""
    file, output = tmp_path / "two.jsonl", tmp_path / "out.json"
    lines = [{"source": e.source, "targets": [*e.targets[:2], ""]} for e in demo.examples("test")[:3]]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [str(file), "--tokenizer", str(tokenizer_files), "--model", "tiny", "--limit", "2", "--threads", "1"]
    assert documents.main([*flags, "--weights", "float32,int8", "--json", str(output)]) == 0
    found = json.loads(output.read_text())["results"]
    ours = ["pipejax-pipelined", "pipejax-sequential", "pipejax-pipelined-int8", "pipejax-sequential-int8"]
    assert [r["system"] for r in found] == [*ours, "hf"]
    assert all(r["documents"] == 2 and r["seconds"] > 0 for r in found)
    assert "2 documents, batch 1, tiny" in capsys.readouterr().out
    for more, said in (
        (["--peers", "hg"], "--peers: found hg; expected hf"),
        (["--peers", "hf,ct2-int8", "--batch", "2"], "found CTranslate2 with batches"),
    ):
        with pytest.raises(UserError, match=said):
            documents.main([*flags, *more])


def test_bytes_of_a_step_equal_its_weights_and_source(params):
    config = SIZES["tiny"]
    (system,) = build(config, params, "float32", strategies={"chain": Sequential(8)})
    weights = system.decoder.ready.decoding
    matrices = sum(x.nbytes for x in jax.tree.leaves(weights.layers) if x.ndim > 1) + weights.head.rows.nbytes
    source = 2 * 2 * 64 * 32 * 4  # keys and values of two layers, 64 tokens and 2 heads of 16
    assert systems.step_bytes(config, source=64, slots=0, itemsize=4) == matrices + source


def test_chart_describes_patterns_and_is_reproducible(tmp_path):
    assert plot.in_words("8x14", 1) == "8 rows of 14 tokens"
    assert plot.in_words("8x14u", 8) == "8 rows of 14 tokens, one of them 1.5 times as long, 8 documents at a time"
    times = {"batch": 1, "encode_s": 0.5, "decode_s": 1.0, "steps": 7}
    results = [times | {"pattern": p, "system": s} for p in ("3x4", "2x5", "2x5u") for s in ("pipejax-pipelined", "hf")]
    (tmp_path / "found.json").write_text(json.dumps({"results": results, "machine": {}}))
    for name in ("a.svg", "b.svg"):
        assert plot.main([str(tmp_path / "found.json"), "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("seconds, cut", [((1.0, 1.1, 1.2), 0), ((1.0, 1.1, 9.0), 1), ((1.0, 9.0, 1.1, 1.2, 8.0), 2)])
def test_shortened_bar_has_gaps(seconds, cut, tmp_path):
    results = [
        {"pattern": "3x4", "batch": 1, "system": f"system {i}", "encode_s": 0.1, "decode_s": x - 0.1}
        for i, x in enumerate(seconds)
    ]
    path = tmp_path / "chart.svg"
    plot.draw(results, "T5-Tiny", str(path))
    assert path.read_text().count('<g id="break">') == 2 * cut


@pytest.mark.long
def test_drafts_are_timed(tmp_path, tokenizer, tokenizer_files, capsys, monkeypatch):
    """Every system writes the answers of the file, or fails; drafts are correct as often as answers copy."""
    monkeypatch.setattr(drafts, "GRID", Pipelined(delay=1, time_max=32, sub_max=3))  # fewer sizes to compile
    text = demo.examples("test")[0].source
    words, file, output = text.split(), tmp_path / "copied.jsonl", tmp_path / "out.json"
    rows = [" ".join(words[1:6]), " ".join(words[8:12])]
    file.write_text(json.dumps({"source": text, "targets": rows}) + "\n")
    names = "sequential,sequential+source,sequential+model,pipelined,pipelined+model,pipelined+spans,"
    names += "hf+lookup,hf+assistant"
    flags = [str(file), "--tokenizer", str(tokenizer_files), "--model", "tiny", "--small", "tiny", "--rounds", "1"]
    flags += ["--max-source", "96", "--systems", names, "--tokens", "3", "--threads", "1"]
    assert drafts.main([*flags, "--json", str(output)]) == 0
    calls = {result["system"]: result["calls"] for result in json.loads(output.read_text())["results"]}
    length = len(tokenizer.encode("; ".join(rows))) + 1
    assert calls["sequential"] == length and calls["hf+assistant"] < length
    # All drafts are correct: a call writes three drafted tokens and one more.
    assert calls["sequential+model"] == -(-length // 4)
    assert calls["sequential+source"] < length and calls["pipelined+model"] < calls["pipelined"]
    assert calls["pipelined+spans"] < calls["pipelined"]
    assert "sequential+source" in capsys.readouterr().out
    with pytest.raises(UserError, match="--systems: found other; expected sequential"):
        drafts.main([*flags, "--systems", "other"])


@pytest.mark.slow
def test_streams_are_timed_beside_records(tmp_path, capsys, monkeypatch):
    config = Config(
        name="run",
        model=MORE_WORDS,
        grid=GridConfig(time_max=6, sub_max=2),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(batch_size=1),
    )
    checkpoint.save_params(tmp_path / "run", config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"source_ids": [i, 5, 1]}) + "\n" for i in range(2, 9)))
    flags = ["--checkpoint", str(tmp_path / "run"), "--input", str(tmp_path / "in.jsonl"), "--documents", "3"]
    flags += ["--rounds", "2", "--weights", "float32"]
    assert streams.main([*flags, "--json", str(tmp_path / "out.json")]) == 0
    (found,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (found["weights"], found["documents"], found["rounds"]) == ("float32", 3, 2)
    assert found["events"] >= 1 and found["stream_ms"] > 0 and found["decode_ms"] > 0 and 0 < found["first"] <= 1
    assert "times as long" in capsys.readouterr().out
    real = Generator.decode  # a decoder whose answer differs from the stream is detected
    monkeypatch.setattr(Generator, "decode", lambda self, given: [{**real(self, given)[0], "row_ids": [[9]]}])
    with pytest.raises(AssertionError, match="the answer differs from that of decode"):
        streams.main(flags)


@pytest.mark.slow
def test_median_interval_covers_the_median_of_random_samples():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        low, high = systems.median_interval(rng.exponential(size=9).tolist())
        covered += low <= np.log(2) <= high
    assert 0.95 <= covered / 2000 <= 0.975  # 96.1 % in theory: the second smallest and the second largest of nine
    assert systems.median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (1.0, 6.0)
    assert systems.median_interval([1.0] * 5) is None


@pytest.mark.slow
def test_two_trees_take_turns(tmp_path, capsys):
    out = tmp_path / "trees.json"
    flags = ["--model", "tiny", "--sources", "2x8,5+7", "--pattern", "2x3", "--rounds", "1", "--threads", "1"]
    assert trees.main([".", ".", *flags, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [x["sources"] for x in found["results"]] == ["2x8", "5+7"]
    assert all(x[key] > 0 for x in found["results"] for key in ("encode", "decode", "both"))
    assert capsys.readouterr().out.count("x; both") == 2


@pytest.mark.parametrize(("text", "lengths"), [("512", [512]), ("3x64", [64] * 3), ("90+331", [90, 331])])
def test_lengths_of_a_batch(text, lengths):
    assert trees.lengths_of(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "3x", "x5", "3x64+2", "5+"])
def test_invalid_batch_is_refused(text):
    with pytest.raises(UserError, match=r"--sources: found .*; expected such as 512"):
        trees.lengths_of(text)
