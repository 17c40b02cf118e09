"""Unlabelled training examples: targets occur in their sources and follow the rules."""

import gzip
import json
import re

import numpy as np
import pytest

from lab.experiments import pretraining
from pipejax.config import T5Config
from pipejax.data.examples import Example
from pipejax.data.lines import read_file
from pipejax.data.tokenizer import Tokenizer
from pipejax.model.layers import RelativeBias
from pipejax.system.errors import UserError

FILLER = "So it was as it is, and so it will be. "
OWLS = "The barn owl hunts at night. A vole hides from the barn owl. The vole is small. "
DOCUMENTS = [OWLS + FILLER * 3, "The snow is white. The milk is white. It is so. " + FILLER * 2, *[FILLER * 4] * 3]


@pytest.fixture(autouse=True)
def few_common_words(monkeypatch):
    monkeypatch.setattr(pretraining, "COMMON", 11)  # the, is, so and the words of the filler


def words_only(text):
    return " ".join(re.findall(r"\w+", text.lower()))


def by_name():
    counts = pretraining.document_frequencies(DOCUMENTS)
    return {
        f"{number}/{name}": (source, target)
        for number, found in enumerate(pretraining.examples(DOCUMENTS, counts))
        for name, source, target in found
    }


def test_phrases_are_repeated_rare_words_in_order():
    found = by_name()
    source, target = found["0/0/phrases"]
    # "barn", "owl" and "vole" are as rare as "barn owl" but weigh less, or are a part of it; "night" occurs once.
    assert target == "barn owl; vole"
    assert source.startswith("Title: The barn owl hunts at night. Context: A vole hides from the barn owl.")
    assert found["1/0/phrases"][1] == "white"
    assert "2/0/phrases" not in found  # the document has no rare words


def test_sentences_are_taken_from_the_start():
    source, target = by_name()["0/0/sentences"]
    assert target == "The barn owl hunts at night. A vole hides from the barn owl."
    assert source.startswith(f"summarize: {target} The vole is small. So it was")


def test_stretches_hold_whole_sentences_and_no_more_words_than_allowed():
    sentence, long = "One two three four five six seven eight nine ten.", "Word " * pretraining.STRETCH + "end."
    runs = list(pretraining.stretches(" ".join([sentence] * 9 + [long] + [sentence] * 9)))
    assert all(text == sentence for run in runs for text in run)
    assert [len(run) for run in runs] == [6, 3, 6, 3]  # the long sentence is left out, and no run crosses it


@pytest.mark.slow
def test_some_heads_attend_to_neighbours_in_initial_weights():
    model = T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=2, num_decoder_layers=2)
    params = pretraining.weights(model)
    offsets = np.arange(-20, 21)  # key - query

    def favourite(stack, bidirectional):
        bias = RelativeBias(model, bidirectional=bidirectional)
        seen = offsets if bidirectional else offsets[offsets <= 0]
        found = bias.apply(
            {"params": params[stack]["relative_bias"]}, np.zeros((1, 1), int), seen[None]
        )  # [1, H, 1, C]
        return [int(seen[i]) for i in np.argmax(found[0, :, 0], axis=-1)]

    assert favourite("encoder", True)[:3] == [-1, 1, 0]
    assert favourite("decoder", False)[:2] == [0, -1]


@pytest.mark.slow
def test_command_writes_weights_and_examples(tmp_path):
    numbered = [f"Number {i} begins. {DOCUMENTS[i % 5]}" for i in range(250)]
    lines = "".join(json.dumps({"source": text}) + "\n" for text in numbered)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")]
    assert pretraining.main([*files, "--output", str(tmp_path / "out")]) == 0
    tokenizer = Tokenizer.load(tmp_path / "out" / "start" / "tokenizer")
    ids = tokenizer.encode("The Barn Owl; a vole.")
    assert tokenizer.decode([*ids, 1, 0]) == "the barn owl; a vole."  # 0 and 1 are pad and eos, as in T5
    assert min(ids) > 2
    (first, *rest), words = [value for _, value in read_file(str(tmp_path / "out" / "words.jsonl"))], set()
    for text in numbered:
        words |= set(text.lower().replace(".", "").replace(",", "").split())
    assert first["targets"] == [first["source"]] and set(first["source"].split()) <= words
    assert len(words) > 10 and all(6 <= len(value["source"].split()) <= 14 for value in rest)
    parts = {}
    for split in ("train", "dev"):
        values = [value for _, value in read_file(str(tmp_path / "out" / f"{split}.jsonl"))]
        parts[split] = [Example(v["id"], v["source"], tuple(v["targets"])) for v in values]
    documents = {split: {e.id.partition("/")[0] for e in part} for split, part in parts.items()}
    assert documents["dev"] and not documents["train"] & documents["dev"]
    assert len(documents["train"]) + len(documents["dev"]) == 500
    for example in parts["train"]:
        (target,) = example.targets
        assert all(f" {words_only(phrase)} " in f" {words_only(example.source)} " for phrase in target.split("; "))


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "found no lines"), ('{"source": "a"}\n{"text": "b"}\n', ':2: found no "source"'), (None, "No such file")],
)
def test_unreadable_input_raises_one_line(content, says, tmp_path):
    if content is not None:
        (tmp_path / "texts.jsonl").write_text(content)
    with pytest.raises(UserError, match="texts.jsonl.*" + says):
        pretraining.main([str(tmp_path / "texts.jsonl"), "--output", str(tmp_path / "out")])
