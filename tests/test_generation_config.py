"""A converted checkpoint decodes as `generate` with generation_config.json, or a line reports the difference."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import pipejax
from pipejax import checkpoint
from pipejax.config import DecodeConfig, T5Config
from pipejax.convert import generation, huggingface
from support import oracle

MODEL = T5Config(
    vocab_size=40,
    d_model=16,
    d_kv=4,
    d_ff=24,
    num_heads=2,
    num_layers=2,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)
PARAMS = oracle.random_params(MODEL, np.random.default_rng(3), eos_scale=2.0)
SOURCES = np.random.default_rng(1).integers(3, 40, (6, 5)).tolist()
MOST = 14  # tokens without a setting; transformers' default of 20 is rarely intended
IDS = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the kernel, which needs a C++ compilation."""
    monkeypatch.setenv("PIPEJAX_NATIVE", "off")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: several threads would wait longer than such a small T5 computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def directory(place: Path, generate: dict[str, Any] | None, config: dict[str, Any] | None = None) -> Path:
    """A T5 for transformers; None: no file. `config` changes config.json; `...` removes a key."""
    huggingface.write_hf(MODEL, PARAMS, place, None)
    facts = json.loads((place / "config.json").read_text()) | (config or {})
    (place / "config.json").write_text(json.dumps({key: value for key, value in facts.items() if value is not ...}))
    file = place / "generation_config.json"
    file.unlink() if generate is None else file.write_text(json.dumps(generate))
    return place


def theirs(place: Path, **settings: Any) -> list[list[int]]:
    """The tokens of transformers after the start, up to the eos of its config."""
    model = transformers.T5ForConditionalGeneration.from_pretrained(place).eval()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    ids = torch.tensor(SOURCES)
    rows = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, 1:].tolist()
    return [row[: min((row.index(end) for end in ends if end in row), default=len(row))] for row in rows]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """An answer without any settings except ids."""
    rows = theirs(directory(tmp_path_factory.mktemp("plain") / "hf", IDS), max_new_tokens=MOST)
    assert 0 < sum(len(row) < MOST for row in rows) < len(rows)  # some answers end with eos
    return rows


# generation_config.json; config.json; whether the answers differ from the plain ones.
FOLLOWED: dict[str, tuple[dict[str, Any] | None, dict[str, Any], bool]] = {
    "another start": (IDS | {"decoder_start_token_id": 7}, {}, True),
    "another eos": (IDS | {"eos_token_id": 12}, {}, True),
    "a list of one": (IDS | {"eos_token_id": [12], "decoder_start_token_id": 7}, {}, True),
    "it goes before several ends of config.json": (IDS | {"eos_token_id": 12}, {"eos_token_id": [1, 2]}, True),
    "bos where no start is": ({"bos_token_id": 9, "eos_token_id": 1}, {}, True),
    "another pad": (IDS | {"pad_token_id": 5}, {}, False),
    "new tokens": (IDS | {"max_new_tokens": 3, "max_length": 50}, {}, True),
    "length": (IDS | {"max_length": 4}, {}, True),
    "beams": (IDS | {"num_beams": 3, "max_new_tokens": 12}, {}, True),
    "beams and a penalty": (IDS | {"num_beams": 4, "length_penalty": 3, "max_new_tokens": 12}, {}, True),
    "config.json alone": (None, {"num_beams": 3, "max_length": 9}, True),
    "bos of config.json alone": (None, {"decoder_start_token_id": ..., "bos_token_id": 9}, True),
    "config.json does not count": (IDS, {"num_beams": 3, "max_length": 4, "decoder_start_token_id": 7}, False),
    "settings of draws without draws": (IDS | {"temperature": 0.2, "top_k": 3, "top_p": 0.5}, {}, False),
    "settings of beams without beams": (IDS | {"length_penalty": 4.0, "early_stopping": True}, {}, False),
}


@pytest.mark.parametrize("case", FOLLOWED)
def test_settings_decode_as_generate_does(case: str, plain: list[list[int]], tmp_path: Path, capsys: Any) -> None:
    """With our ids in the file and our settings as arguments, `generate` writes the same as with its own files."""
    generate, config, differs = FOLLOWED[case]
    source = directory(tmp_path / "hf", generate, config)
    model, _ = huggingface.read_hf(source)
    decode = huggingface._run_settings(source, model).decode
    says = generate if generate is not None else config
    bounded = {"max_length", "max_new_tokens"} & says.keys()
    expected = theirs(source, **({} if bounded else {"max_new_tokens": MOST}))
    ids = {key: getattr(model, key) for key in IDS}
    settings = {"num_beams": decode.beams, "length_penalty": decode.length_penalty, "do_sample": False}
    most = decode.max_length if bounded else MOST
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(ids))
    assert theirs(source, max_new_tokens=most, **settings) == expected
    assert (expected != plain) == differs
    assert "ignored" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a list of one", "beams and a penalty", "length"])
def test_a_converted_checkpoint_decodes_as_generate_does(case: str, tmp_path: Path) -> None:
    generate, config, _ = FOLLOWED[case]
    bounded = {"max_length", "max_new_tokens"} & (generate or {}).keys()
    source = directory(tmp_path / "hf", generate, config)
    huggingface.from_hf(source, tmp_path / "out")
    t5 = pipejax.load(tmp_path / "out", overrides=[] if bounded else [f"decode.max_length={MOST}"])
    found = [record["row_ids"][0] for record in t5.decode(SOURCES)]
    assert found == theirs(source, **({} if bounded else {"max_new_tokens": MOST}))


def test_generate_runs_a_decoder_deeper_than_its_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cache of transformers has as many layers as the encoder; its answers equal greedy answers by hand."""
    config = dataclasses.replace(MODEL, num_layers=1, num_decoder_layers=3)
    huggingface.write_hf(config, oracle.random_params(config, np.random.default_rng(4)), tmp_path / "hf", None)
    assert "generation_config.json: has use_cache = false" in capsys.readouterr().err
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
    for source, found in zip(SOURCES, theirs(tmp_path / "hf", max_new_tokens=5), strict=True):
        row = [0]
        while len(row) <= 5 and row[-1] != 1:
            logits = model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([row]), use_cache=False
            ).logits
            row.append(int(logits[0, -1].argmax()))
        assert found == [token for token in row[1:] if token != 1]


def lines(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines about the file in its conversion."""
    capsys.readouterr()
    huggingface.from_hf(source, out)
    return [line for line in capsys.readouterr().err.splitlines() if "no tokenizer files" not in line]


def test_differences_from_config_json_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = directory(tmp_path / "hf", {"eos_token_id": 12, "decoder_start_token_id": 7, "pad_token_id": 0})
    file = source / "generation_config.json"
    assert lines(source, tmp_path / "out", capsys) == [
        f"{file}: takes precedence over config.json, as in transformers: eos_token_id 12 (config.json: 1), "
        "decoder_start_token_id 7 (config.json: 0)"
    ]
    file.write_text('{"num_beams": 2, "max_length": 30}')
    assert lines(source, tmp_path / "out2", capsys) == [
        f"{file}: lacks eos_token_id 1, decoder_start_token_id 0, read from config.json instead; transformers' "
        "generate would fail without a start token, and not end without an eos",
        f"{file}: used as decode.max_length=29, decode.beams=2",
    ]
    file.write_text(json.dumps(IDS | {"pad_token_id": -1}))  # some files write this for "none"
    assert huggingface.read_hf(source)[0] == MODEL
    file.write_text(json.dumps(IDS | {"decoder_start_token_id": [7]}))
    assert huggingface.read_hf(source)[0].decoder_start_token_id == 7
    file.write_text(json.dumps(IDS | {"transformers_version": "4.51.0", "_from_model_config": True, "use_cache": True}))
    assert lines(source, tmp_path / "out3", capsys) == []


NOT_FOLLOWED = {
    "encoder_no_repeat_ngram_size": 2,
    "min_length": 30,
    "min_new_tokens": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 1,
    "bad_words_ids": [[3]],
    "suppress_tokens": [3],
    "num_return_sequences": 2,
    "guidance_scale": 2.0,
    "stop_strings": ["x"],
}
NEUTRAL: dict[str, Any] = {
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "bad_words_ids": None,
    "suppress_tokens": [],
    "num_return_sequences": 1,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "length_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "output_attentions": False,
    "cache_implementation": "static",
    "num_assistant_tokens": 5,
}


def test_lost_settings_are_logged_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = directory(tmp_path / "hf", IDS | NOT_FOLLOWED)
    [line] = lines(source, tmp_path / "out", capsys)
    assert line.startswith(f"{source}/generation_config.json: ignored settings, which pipejax does not support: ")
    for key, value in NOT_FOLLOWED.items():
        assert f"{key}={json.dumps(value)}" in line
    assert checkpoint.open_run(tmp_path / "out").config.decode == DecodeConfig()


def test_each_setting_is_distinguished_from_its_neutral_value(tmp_path: Path, capsys: Any) -> None:
    source = directory(tmp_path / "hf", IDS)
    for key, value in NOT_FOLLOWED.items():
        (source / "generation_config.json").write_text(json.dumps(IDS | NEUTRAL | {key: value}))
        assert [*generation.read_generation(source, {}).lost()] == [key]
    (source / "generation_config.json").write_text(json.dumps(IDS | NEUTRAL))
    assert lines(source, tmp_path / "out", capsys) == []


@pytest.mark.parametrize(
    "given, decode, lost",
    [
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}, ""),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}, {"temperature": 0.7, "top_p": 0.9}, ""),
        ({"do_sample": True, "min_p": 0.1}, {"temperature": 1.0, "top_k": 50, "min_p": 0.1}, ""),
        ({"do_sample": True, "min_p": 1.5}, {"temperature": 1.0, "top_k": 50}, "min_p=1.5"),
        ({"do_sample": True, "typical_p": 0.5}, {"temperature": 1.0, "top_k": 50}, "typical_p=0.5"),
        ({"do_sample": False, "min_p": 0.1}, {}, ""),
        (
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            "",
        ),
        ({"repetition_penalty": 1000.0}, {}, "repetition_penalty=1000.0"),
        ({"num_beams": 2, "no_repeat_ngram_size": 2}, {"beams": 2}, "no_repeat_ngram_size=2"),
        ({"do_sample": True, "num_beams": 2}, {}, "do_sample=true, num_beams=2"),
        ({"num_beams": 2, "early_stopping": True}, {"beams": 2}, "early_stopping=true"),
        ({"num_beams": 4, "num_beam_groups": 2}, {"beams": 4}, "num_beam_groups=2"),
        ({"num_beams": 30}, {}, "num_beams=30"),  # more than half of the vocabulary
        ({"num_beams": 2, "length_penalty": 9.0}, {"beams": 2}, "length_penalty=9.0"),
        ({"max_new_tokens": "many"}, {}, 'max_new_tokens="many"'),
        ({"max_length": 1}, {}, "max_length=1"),
        ({"do_sample": True, "temperature": 1000.0, "top_k": 7}, {}, "do_sample=true, top_k=7"),
        ({"do_sample": True, "temperature": 0.0, "top_k": 7}, {}, ""),  # greedily
    ],
)
def test_settings_of_sampling_and_beams_are_converted(
    given: Any, decode: Any, lost: str, tmp_path: Path, capsys: Any
) -> None:
    source = directory(tmp_path / "hf", IDS | given)
    assert huggingface._run_settings(source, MODEL).decode == dataclasses.replace(DecodeConfig(), **decode)
    said = capsys.readouterr().err.splitlines()
    assert [line.endswith(f": {lost}") for line in said if ": ignored" in line] == ([True] if lost else [])
    assert any("used as decode." in line for line in said) == bool(decode)
