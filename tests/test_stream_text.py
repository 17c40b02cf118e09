"""The joined texts of a stream equal the record's text, for all kinds of tokenizers and truncations."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from starlette.testclient import TestClient
from tokenizers import decoders, models

from pipejax.apps.schemas.token_bytes import token_bytes
from pipejax.apps.serving.row_text import Writing
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.data.tokenizer import Growing, Tokenizer
from pipejax.inference.generator import Generator
from support import oracle, tiny
from support.scripted_engine import ScriptedEngine
from support.served import connect, service
from support.tokenizer_kinds import BYTES, KINDS, WORDS, numbered, save, unigram

pytestmark = pytest.mark.usefixtures("compiled_once")
Step = decoders.Decoder


def decoded_by(*steps: Step, pieces: list[str] | None = None) -> Callable[[Path], Path]:
    """A tokenizer with the given steps of decoding."""

    def make(directory: Path) -> Path:
        vocabulary = ["<pad>", "</s>", "<unk>", *(pieces or [*WORDS, *BYTES])]
        inner = tokenizers.Tokenizer(models.BPE(numbered(*vocabulary), [], unk_token="<unk>", byte_fallback=True))
        inner.decoder = decoders.Sequence([*steps])
        return save(directory, inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")

    return make


def fallback_unigram(directory: Path) -> Path:
    inner = unigram(["<pad>", "</s>", "<unk>", *WORDS, *BYTES], 2, byte_fallback=True)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(directory, inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


SPACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
DECODERS: dict[str, Callable[[Path], Path]] = {
    **KINDS,
    "llama": fallback_unigram,
    "one step": decoded_by(SPACE),
    "bytes after pieces are joined": decoded_by(SPACE, FUSE, FALLBACK),
    "a replacement over joined pieces": decoded_by(SPACE, FALLBACK, FUSE, decoders.Replace(" x", "-")),
    "one character of joined pieces": decoded_by(FALLBACK, FUSE, SPACE),
    "ends of words": decoded_by(decoders.BPEDecoder("</w>"), pieces=["a", "b</w>", "c</w>", ",</w>", "d"]),
    "repeats": decoded_by(decoders.CTC("<pad>", "|"), pieces=["a", "b", "|", "c"]),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kinds")
    return {name: make(root / str(i)) for i, (name, make) in enumerate(DECODERS.items())}


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The id of each byte; none if the tokenizer has no bytes."""
    vocabulary = tokenizer._inner.get_vocab()
    if BYTES[0] in vocabulary:
        return [vocabulary[piece] for piece in BYTES]
    if tokenizer.decoders() not in (None, ("ByteLevel",)):
        return []
    written = token_bytes(tokenizer, tokenizer.size)
    return [written.index(bytes([byte])) for byte in range(256)]


def rows_of_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens like an untrained model's: special ids, and bytes that are UTF-8 or not, adjacent and apart."""
    rng, known = random.Random(3), byte_ids(tokenizer)
    found = []
    for _ in range(250):
        row: list[int] = []
        for _ in range(rng.randrange(10)):
            kind = rng.randrange(6)
            if kind == 0 or not known:
                row += [rng.randrange(tokenizer.size) for _ in range(rng.randrange(1, 5))]
            elif kind == 1:
                row += [rng.randrange(4)]
            else:
                text = rng.choice(["é", "漢", "🙂", "aé", "  ", "\u00a0", "\u3000", "the ", "�", "e\u0301"]).encode()
                broken = text[: rng.randrange(1, len(text) + 1)] if kind == 2 else text
                row += [known[byte] for byte in broken[:: rng.choice([1, 1, 1, -1])]]
        found.append(row)
    return found


@pytest.mark.parametrize("kind", DECODERS)
def test_pieces_joined_are_the_text_of_the_whole_row(kind: str, made: dict[str, Path]) -> None:
    """The text equals that of transformers, wherever the row is split."""
    tokenizer, theirs = Tokenizer.load(made[kind]), transformers.AutoTokenizer.from_pretrained(made[kind])
    for row in rows_of_ids(tokenizer):
        whole = theirs.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
        growing = Growing(tokenizer)
        pieces = [growing.add(token) for token in row]
        assert "".join([*pieces, growing.rest()]) == whole == tokenizer.decode(row), row


@pytest.mark.parametrize("kind", ["roberta", "bert", "gemma", "t5", "byt5", "llama", "one step", "ends of words"])
def test_text_that_no_later_token_changes_is_not_held_back(kind: str, made: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(made[kind])
    ids = [i for i in range(3, tokenizer.size) if tokenizer.is_word(i) and tokenizer.decode([i]).isalpha()] * 3
    growing, text = Growing(tokenizer), ""
    for count, token in enumerate(ids, start=1):
        text += growing.add(token)
        assert text == tokenizer.decode(ids[:count])


def test_character_in_invalid_byte_run_is_not_streamed(made: dict[str, Path]) -> None:
    """The first two bytes alone are "é". With the third, the run is three replacement characters."""
    tokenizer = Tokenizer.load(made["gemma"])
    first, second, third = (byte_ids(tokenizer)[byte] for byte in (0xC3, 0xA9, 0xE4))
    (x,) = tokenizer.encode("x")
    assert tokenizer.decode([x, first, second]) == "xé" and tokenizer.decode([x, first, second, third]) == "x���"
    growing = Growing(tokenizer)
    assert [growing.add(token) for token in (x, first, second, third)] == ["x", "", "", ""]
    assert growing.rest() == "���"
    growing = Growing(tokenizer)
    assert [growing.add(token) for token in (x, first, second, x)] == ["x", "", "", "éx"]


@pytest.mark.parametrize("kind", ["gemma", "llama", "roberta", "byt5", "bert"])
@pytest.mark.parametrize("stop", [(), ("é",), ("�x", "漢"), ("🙂",)])
def test_streamed_parallel_rows_equal_record_text(kind: str, stop: tuple[str, ...], made: dict[str, Path]) -> None:
    """They are equal up to a stop text, which may come in any piece."""
    tokenizer = Tokenizer.load(made[kind])
    rows = [row for row in rows_of_ids(tokenizer) if row]
    for k in range(0, len(rows) - 3, 9):
        chosen = rows[k : k + 3]
        writing = Writing(tokenizer, start=lambda row: 2 * row, separator=" ; ", stop=stop)
        tokens = sorted((2 * i + j, i, token) for i, row in enumerate(chosen) for j, token in enumerate(row))
        pieces = [piece for _, row, token in tokens for piece in writing.add(row, token, 0.0)] + writing.end()
        whole = " ; ".join(text for row in chosen if (text := tokenizer.decode(row)))
        cuts = [place for text in stop if (place := whole.find(text)) >= 0]
        assert "".join(piece.text for piece in pieces) == whole[: min(cuts, default=len(whole))]
        assert writing.stopped == bool(cuts)


# By the server, whose scripted engine writes the prompt's tokens, three in a row: most rows end inside a character.


def generator_of(directory: Path, *, vocabulary: int) -> Generator:
    tokenizer = Tokenizer.load(directory)
    model = dataclasses.replace(tiny.MODEL, vocab_size=vocabulary)
    config = tiny.change(dataclasses.replace(tiny.RUN, model=model), data={"max_source": 64}, grid={"delay": 1})
    return Generator(config, oracle.random_params(model, np.random.default_rng(7)), tokenizer)


@pytest.fixture(scope="module", params=["gemma", "roberta", "byt5", "llama"])
def client(request: pytest.FixtureRequest, made: dict[str, Path]) -> TestClient:
    return connect(service(ScriptedEngine(generator_of(made[request.param], vocabulary=400))))


def events(reply: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("text", ["xé漢x 🙂", "漢漢漢漢", "é é é", "plain", "x�x"])
@pytest.mark.parametrize("stop", [[], ["漢"], ["x"]])
def test_streams_of_each_route_equal_whole_answer(client: TestClient, text: str, stop: list[str]) -> None:
    asked: dict[str, Any] = {"stop": stop} if stop else {}
    body: dict[str, Any] = {"prompt": text, **asked}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    parts = [chunk["choices"][0] for chunk in events(client.post("/v1/completions", json=body | {"stream": True}))]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    body = {"messages": [{"role": "user", "content": text}], **asked}
    said = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    parts = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == said == whole["text"]
    if not stop:
        said = client.post("/v1/responses", json={"input": text}).json()["output"][0]["content"][0]["text"]
        parts = events(client.post("/v1/responses", json={"input": text, "stream": True}))
        assert "".join(part["delta"] for part in parts if part["type"].endswith("text.delta")) == said == whole["text"]


def test_answer_ending_with_stop_text_has_finish_reason_stop(made: dict[str, Path], monkeypatch: Any) -> None:
    """The answer was truncated at that place, in the same step."""
    engine = ScriptedEngine(generator_of(made["gemma"], vocabulary=400))
    record = engine.record
    monkeypatch.setattr(engine, "record", lambda rows: record(rows) | {"truncated": "max_tokens"})
    for stop, reason in (("é", "stop"), ("漢", "length")):
        body = {"prompt": "é", "stop": stop, "max_tokens": 3}
        (choice,) = connect(service(engine)).post("/v1/completions", json=body).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("" if reason == "stop" else "é", reason)


@pytest.mark.parametrize("text", ["xé漢x 🙂", "漢漢漢漢"])
def test_streamed_rows_equal_record(client: TestClient, text: str) -> None:
    body = {"prompt": text, "rows": True, "stream": True}
    parts = [chunk["choices"][0] for chunk in events(client.post("/v1/completions", json=body))]
    record = parts[-1]["record"]
    for i, row in enumerate(record["rows"]):
        assert "".join(part["text"] for part in parts[:-1] if part["row"] == i) == row


# From Python: random weights, which write bytes in any order.


@pytest.mark.parametrize("method", ["pipelined", pytest.param("sequential", marks=pytest.mark.slow)])
@pytest.mark.parametrize("unique", [False, True])
def test_the_last_event_of_a_row_has_its_text_in_the_record(method: str, unique: bool, tmp_path: Path) -> None:
    """Truncated rows have no event that marks their end."""
    pieces = ["<0xC3>", "<0xA9>", "<0xE4>", "<0xB8>", "<0xAD>", "a", "▁", "b", "<0xFF>"]
    tokenizer = Tokenizer.load(decoded_by(SPACE, FALLBACK, FUSE, pieces=pieces)(tmp_path / "it"))
    config = Config(
        model=tiny.MORE_WORDS,
        grid=GridConfig(delay=2, time_max=9, sub_max=4),
        train=TrainConfig(method=method),
        decode=DecodeConfig(max_length=12, temperature=1.0, unique_rows=unique),
    )
    made = Generator(config, oracle.random_params(tiny.MORE_WORDS, np.random.default_rng(4)), tokenizer)
    rng, cut = np.random.default_rng(1), 0
    for seed in range(12):
        ids = [*rng.integers(2, 12, 8).tolist(), 1]
        streamed: list[Any] = [*made.stream_rows(ids, method=method, seed=seed)]
        *found, record = streamed
        texts = {event.row: event.text for event in found}
        said = [texts[row] for row in sorted(texts)]
        assert said == [tokenizer.decode(row) for row in record["row_ids"] if row]
        if method == "pipelined":
            assert said == [text for text, row in zip(record["rows"], record["row_ids"], strict=True) if row]
        else:
            assert said == ([record["text"]] if record["row_ids"][0] else [])
        cut += record["truncated"] is not None and any("�" in text for text in said)
    assert cut > 2
