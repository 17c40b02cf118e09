"""Each kind of tokenizer directory equals transformers' tokenizer; nothing is downloaded."""

import dataclasses
import io
import json
import logging
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipejax import checkpoint
from pipejax.convert.huggingface import from_hf, write_hf
from pipejax.data.tokenizer import Tokenizer, check_digests, digests
from pipejax.system.errors import UserError
from support import oracle, tiny

ROOT = Path(__file__).parents[1]
PARAMS = oracle.random_params(dataclasses.replace(tiny.MODEL, vocab_size=128), np.random.default_rng(0))
TEXTS = [
    "The house is wonderful.",
    "  two  spaces\tand\na line ",
    "déjà vu, ﬁne Ⅻ",
    "x^{2}~ <3",
    "中文 🙂",
    "",
    "a</s>b",
    "<extra_id_0> c <pad>",
    "e\u0301tude",
    "the river ; small apples .",
    "word " * 3000,
]


@pytest.fixture(scope="module")
def t5(real_data: Path) -> Path:
    """The original T5 files, which are not part of the repository."""
    directory = real_data / "t5_tokenizer"
    if not (directory / "spiece.model").is_file():
        pytest.skip(f"no T5 tokenizer in {directory}")
    return directory


@pytest.fixture(scope="module")
def byt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ByT5Tokenizer

    directory = tmp_path_factory.mktemp("byt5")
    ByT5Tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def demo(tokenizer_files: Path) -> Path:
    return tokenizer_files


@pytest.fixture(scope="module")
def sentinels_inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with only a spiece.model like mT5's, whose sentinels are among its pieces."""
    import sentencepiece

    directory = tmp_path_factory.mktemp("mt5")
    text = "the quick brown fox jumps over a lazy dog and sleeps under warm bright summer skies by rivers "
    lines = [text[i:] + text[:i] for i in range(len(text))]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(directory / "spiece"),
        vocab_size=46,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        user_defined_symbols=["▁<extra_id_1>", "▁<extra_id_0>"],
        minloglevel=2,
    )
    (directory / "spiece.vocab").unlink()
    return directory


def test_real_t5_tokenizer_encodes_known_texts(t5: Path) -> None:
    tokenizer = Tokenizer.load(t5)
    ids = [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5]
    assert tokenizer.encode("translate English to German: The house is wonderful.") == ids
    assert tokenizer.decode([0, *ids, 1, 0]) == "translate English to German: The house is wonderful."
    assert tokenizer.decode([32099, 8774, 2, 32000]) == "Hello"  # sentinels and unknowns are special
    assert tokenizer.decode([100_000, 8774, 32127]) == "Hello"  # a model may have more ids than that
    assert tokenizer.size == 32100


def test_a_bare_sentencepiece_model(t5: Path, tmp_path: Path) -> None:
    shutil.copy(t5 / "spiece.model", tmp_path)
    bare, full = Tokenizer.load(tmp_path), Tokenizer.load(t5)
    assert bare.size == full.size
    assert [bare.encode(text) for text in TEXTS] == [full.encode(text) for text in TEXTS]


def test_a_bare_sentencepiece_model_with_sentinels_inside(sentinels_inside: Path) -> None:
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(sentinels_inside / "spiece.model"))
    tokenizer = Tokenizer.load(str(sentinels_inside))
    assert tokenizer.size == len(pieces)  # no further sentinels
    assert tokenizer.encode("the lazy fox") == pieces.encode("the lazy fox")
    assert tokenizer.decode([0, *pieces.encode("the lazy fox"), 1]) == "the lazy fox"


@pytest.mark.parametrize("kind", ["t5", "byt5", "demo"])
def test_ids_and_texts_equal_transformers(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = request.getfixturevalue(kind)
    theirs, ours = AutoTokenizer.from_pretrained(directory), Tokenizer.load(directory)
    ours.save(tmp_path / "copy")
    again = Tokenizer.load(tmp_path / "copy")
    assert ours.size == again.size == max(theirs.get_vocab().values()) + 1
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False, verbose=False).input_ids
        assert ours.encode(text) == again.encode(text) == ids
        decoded = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
        assert ours.decode(ids) == again.decode(ids) == decoded
    rng = random.Random(1)
    for _ in range(300):  # ids of an untrained model
        ids = [rng.choice([0, 1, 2, rng.randrange(ours.size)]) for _ in range(rng.randrange(12))]
        decoded = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
        assert ours.decode(ids) == decoded


@pytest.mark.parametrize("kind", ["t5", "demo", "byt5", "sentinels_inside"])
def test_pieces_equal_the_vocabulary(kind: str, request: pytest.FixtureRequest) -> None:
    """The text of a piece does not depend on its place, and ids outside the vocabulary have no text."""
    tokenizer = Tokenizer.load(request.getfixturevalue(kind))
    text = "deliver the old maps"
    pieces = [tokenizer.piece(i) for i in tokenizer.encode(text)]
    assert "".join(pieces).replace("▁", "").replace(" ", "") == text.replace(" ", "")
    assert tokenizer.piece(1) == "</s>"
    assert tokenizer.piece(tokenizer.size) == tokenizer.piece(-1) == ""


@pytest.mark.parametrize("kind", ["t5", "byt5", "demo", "sentinels_inside"])
def test_decoded_texts_equal_the_encoded_ones(kind: str, request: pytest.FixtureRequest) -> None:
    """Compared with encoding and decoding by transformers, without white space; exactly the reported words differ."""
    from transformers import AutoTokenizer

    directory = request.getfixturevalue(kind)
    tokenizer = Tokenizer.load(directory)
    inner = tokenizer._inner if kind == "sentinels_inside" else AutoTokenizer.from_pretrained(directory)
    assert tokenizer.eos == inner.eos_token_id
    for text in TEXTS:
        ids = inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        before, after = (
            text.split(),
            inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).split(),
        )
        change = tokenizer.change(text)
        assert change == tokenizer.change(text, ids) and (change is None) == (before == after)
        assert tokenizer.vanishes(text) == all(i == inner.eos_token_id for i in ids)
        if change:
            was, now = (words.split() for words in change)
            starts = [i for i in range(len(before)) if before[i : i + len(was)] == was]
            assert any([*before[:i], *now, *before[i + len(was) :]] == after for i in starts)


CHANGES = {
    "small apples": None,
    "C² apples": ("C²", "C2"),
    "a ＦＵＬＬ b": ("ＦＵＬＬ", "FULL"),
    "ﬁne ¼ dish": ("ﬁne ¼", "fine 14"),
    "Dave <sep> Stewart": ("<sep>", "sep>"),
    "Dave </s> Stewart": ("</s>", ""),
    "see <extra_id_0> there": ("<extra_id_0>", ""),
    "a {b} c": ("{b}", "b"),
    "back\\slash": ("back\\slash", "backslash"),
    "good 🙂 day": ("🙂", ""),
    "e\u0301tude": ("e\u0301tude", "étude"),
    "zero\u200bwidth": ("zero\u200bwidth", "zero width"),
    "no\u00a0break  and\ttab\n": None,  # white space
    "“quotes” – déjà": None,
}
VANISHING = ["\u200b", "\ufeff", "</s>", "</s> </s>", " \u200b\n", ""]


def test_known_changes_of_t5_are_made(t5: Path) -> None:
    tokenizer = Tokenizer.load(t5)
    assert {text: tokenizer.change(text) for text in CHANGES} == CHANGES
    assert all(tokenizer.vanishes(text) for text in VANISHING)
    assert not any(tokenizer.vanishes(text) for text in (*CHANGES, "~", "🙂", "<pad>", "."))


def test_characters_that_a_sentencepiece_model_normalises(sentinels_inside: Path) -> None:
    tokenizer = Tokenizer.load(sentinels_inside)
    assert tokenizer.change("the ﬁox ｏｖｅｒ a dog") == ("ﬁox ｏｖｅｒ", "fiox over")
    assert tokenizer.change("the\u00a0fox  over") is None and tokenizer.change("the </s> fox") == ("</s>", "")
    assert all(tokenizer.vanishes(text) for text in VANISHING) and not tokenizer.vanishes("🙂")


def test_byte_tokenizer_encodes_and_decodes_utf_8(byt5: Path) -> None:
    tokenizer = Tokenizer.load(byt5)
    assert tokenizer.encode("né") == [ord("n") + 3, 0xC3 + 3, 0xA9 + 3]
    assert tokenizer.decode([0, ord("n") + 3, 0xC3 + 3, 0xA9 + 3, 300, 1]) == "né"  # 300 is a sentinel
    assert tokenizer.decode([ord("n") + 3, 0xC3 + 3, 500, 10_000]) == "n"  # half a character, unknown ids
    assert tokenizer.size == 384


def test_half_a_surrogate_pair_is_encoded_as_a_question_mark(byt5: Path, demo: Path) -> None:
    assert Tokenizer.load(byt5).encode("a\ud800") == Tokenizer.load(byt5).encode("a?")
    assert Tokenizer.load(demo).encode("the \ud800") == Tokenizer.load(demo).encode("the ?")


@pytest.mark.parametrize("kind", ["byt5", "demo"])
def test_tokenizer_in_threads_gives_the_same_ids(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer.load(request.getfixturevalue(kind))
    texts = [f"the river {i} ; small apples " * 20 for i in range(64)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts * 4)) == expected * 4
        assert len(set(pool.map(tokenizer.decode, [expected[0]] * 64))) == 1


def test_long_texts_log_nothing(
    byt5: Path, demo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, directory in (("byt5", byt5), ("demo", demo)):
        short = tmp_path / name
        shutil.copytree(directory, short)
        settings = json.loads((short / "tokenizer_config.json").read_text())
        (short / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 8}))
        with caplog.at_level(logging.DEBUG):
            assert len(Tokenizer.load(short).encode("the " * 5000)) >= 5000
    assert capfd.readouterr().err == ""
    assert not [record for record in caplog.records if "length" in record.getMessage()]


def test_saved_padding_and_truncation_do_not_count(demo: Path, tmp_path: Path) -> None:
    shutil.copytree(demo, tmp_path / "copy")
    file = tmp_path / "copy" / "tokenizer.json"
    contents = json.loads(file.read_text())
    contents["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(contents))
    assert len(Tokenizer.load(tmp_path / "copy").encode("the river . the river")) == 5


QUICK = "the quick brown fox jumps over a lazy dog and sleeps under warm bright summer skies by rivers "
# Options of sentencepiece's trainer, a text, and words of the line about ignored options.
OTHER_KINDS: dict[str, tuple[dict[str, object], str, str]] = {
    "bytes": ({"byte_fallback": True, "vocab_size": 320}, "the é fox", "byte_fallback: true"),
    "no prefix": ({"add_dummy_prefix": False}, "the quick fox", "add_dummy_prefix: false"),
    "spaces are kept": ({"remove_extra_whitespaces": False}, "  the  fox ", "remove_extra_whitespaces: false"),
    "spaces behind": ({"treat_whitespace_as_suffix": True}, "the quick fox", "treat_whitespace_as_suffix: true"),
    "words": ({"model_type": "word", "vocab_size": 22}, "The Fox", "model_type: WORD"),
    "symbols": ({"user_defined_symbols": ["<sep>"]}, "the <sep> fox", 'user_defined_symbols: "<sep>"'),
}


def trained(directory: Path, **options: Any) -> Path:
    """A directory with only a spiece.model, trained with these options."""
    import sentencepiece

    lines = [QUICK[i:] + QUICK[:i] for i in range(len(QUICK))]
    common: dict[str, Any] = {"vocab_size": 60, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2}
    directory.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(directory / "spiece"), **(common | options)
    )
    (directory / "spiece.vocab").unlink()
    return directory


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_ignored_settings_of_a_spiece_model_are_logged_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ids equal transformers', and not sentencepiece's, which follows these settings."""
    import sentencepiece
    from transformers import T5Tokenizer

    options, text, words = OTHER_KINDS[kind]
    directory = trained(tmp_path / "own", **options)
    ours = Tokenizer.load(directory)
    assert ours.encode(text) == Tokenizer.load(directory).encode(text)
    assert ours.encode(text) == T5Tokenizer.from_pretrained(directory)(text, add_special_tokens=False).input_ids
    assert ours.encode(text) != sentencepiece.SentencePieceProcessor(model_file=f"{directory}/spiece.model").encode(
        text
    )
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"{directory}: ignored, because T5Tokenizer of transformers 5 ignores them: {words}; ")


def test_settings_of_a_t5_are_not_logged(sentinels_inside: Path, tmp_path: Path, caplog: Any) -> None:
    Tokenizer.load(sentinels_inside)
    Tokenizer.load(trained(tmp_path / "own", normalization_rule_name="nmt_nfkc_cf"))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda content: content["model"].update(byte_fallback=True), 'byte_fallback": true'),
        (lambda content: content["pre_tokenizer"]["pretokenizers"][1].update(prepend_scheme="never"), "prepend_scheme"),
    ],
)
def test_settings_of_a_tokenizer_json_that_t5s_class_does_not_follow(
    change: Any, words: str, sentinels_inside: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Tokenizer.load(sentinels_inside).save(tmp_path / "own")
    file = tmp_path / "own" / "tokenizer.json"
    change(content := json.loads(file.read_text()))
    Tokenizer.load(tmp_path / "own")
    assert not caplog.records
    file.write_text(json.dumps(content))
    Tokenizer.load(tmp_path / "own")
    assert words in caplog.text and "ignored, because T5Tokenizer" in caplog.text
    settings = tmp_path / "own" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("T5Tokenizer", "PreTrainedTokenizerFast"))
    caplog.clear()
    Tokenizer.load(tmp_path / "own")
    assert "ignored" not in caplog.text


BYTE_PIECES = ["<s>", "<pad>", "</s>", "<unk>", *(chr(i) for i in range(33, 127)), "Ġ", "th", "the"]
PAIRS = {
    "vocab.json": json.dumps({piece: i for i, piece in enumerate(BYTE_PIECES)}),
    "merges.txt": "#version: 0.2\nt h\nth e\n",
}
LISTED = {"vocab.txt": "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es"]) + "\n"}


@pytest.mark.parametrize(
    "files, kind", [(PAIRS, "RobertaTokenizer"), (PAIRS, "GPT2Tokenizer"), (LISTED, "BertTokenizer")]
)
def test_vocabularies_of_other_classes(files: dict[str, str], kind: str, tmp_path: Path) -> None:
    """They are read if the class is named, also by the converted checkpoint; otherwise a line names them."""
    from transformers import AutoTokenizer

    source, names = tmp_path / "source", " and ".join(sorted(files))
    write_hf(dataclasses.replace(tiny.MODEL, vocab_size=128, eos_token_id=2), PARAMS, source, None)
    for name, text in files.items():
        (source / name).write_text(text)
    with pytest.raises(UserError, match=rf"^{source}: found {names}"):
        Tokenizer.load(source)
    settings = source / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    with pytest.raises(UserError, match=rf"^{source}: found {names}, which its T5Tokenizer does not read; exp"):
        Tokenizer.load(source)
    end = {"eos_token": "</s>" if files is PAIRS else "[CLS]"}
    settings.write_text(json.dumps({"tokenizer_class": kind, **end}))
    text = "the foxes"
    ids = AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False).input_ids
    assert Tokenizer.load(source).encode(text) == ids
    from_hf(source, tmp_path / "run")
    kept = checkpoint.tokenizer_of(checkpoint.open_run(tmp_path / "run"))
    assert kept is not None and kept.encode(text) == ids and kept.decode(ids) == text


def test_no_advice_about_torch() -> None:
    script = (
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else found(name, *rest)\n"
        "from pipejax.data.tokenizer import import_transformers; import_transformers()"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "found no tokenizer; expected one of tokenizer.json"),
        ({"vocab.bpe": "x", "spm.model": "y"}, "found spm.model and vocab.bpe"),
        ({"config.json": '{"model_type": "t5"}'}, "found no tokenizer"),
        ({"tokenizer_config.json": '{"tokenizer_class": "T5Tokenizer"}'}, "found no vocabulary"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"spiece.model": "junk"}, "spiece.model is damaged"),
    ],
)
def test_invalid_directories_are_refused(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config.json": {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}},
            "tokenizer.json": {},
        },
        {
            "config.json": {"model_type": "t5", "auto_map": {"AutoConfig": "mine.Mine", "AutoTokenizer": "mine.Mine"}},
            "tokenizer_config.json": {"tokenizer_class": "Mine"},
        },
        {"config.json": {"auto_map": {"AutoConfig": "mine.Mine"}}, "tokenizer.json": {}},
        {"config.json": {"auto_map": {"AutoConfig": "mine.Mine"}}, "spiece.model": {}},
    ],
    ids=["tokenizer_config.json", "config.json with a class", "config.json", "spiece.model"],
)
def test_code_in_a_directory_is_never_run(
    files: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first line of standard input is data, and must not be taken for an answer."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    asked = io.StringIO("y\ny\ny\n")
    monkeypatch.setattr(sys, "stdin", asked)
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.readline().strip())
    with pytest.raises(UserError) as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)
    assert asked.tell() == 0 and not (tmp_path / "ran").exists()
    assert "Do you wish to run" not in capfd.readouterr().out


def test_flipped_bit_is_detected(demo: Path, tmp_path: Path) -> None:
    """Every bit of files that are read as saved counts, and so do missing and additional files."""
    copy = tmp_path / "tokenizer"
    shutil.copytree(demo, copy)
    expected = digests(copy)
    assert expected.keys() == {path.name for path in demo.iterdir()}
    check_digests(copy, expected)
    chance, files = random.Random(0), sorted(copy.iterdir())
    for _ in range(400):
        file = chance.choice(files)
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"^{file}: found other content; expected what was saved"):
            check_digests(copy, expected)
        file.write_bytes(content)
    check_digests(copy, expected)
    (copy / ".DS_Store").write_text("x")  # it is never read
    check_digests(copy, expected)
    (copy / "added_tokens.json").write_text("{}")
    with pytest.raises(UserError, match=r"added_tokens\.json: found a file; expected none"):
        check_digests(copy, expected)
    (copy / "added_tokens.json").unlink()
    files[0].unlink()
    with pytest.raises(UserError, match=rf"^{files[0]}: found nothing; expected what was saved"):
        check_digests(copy, expected)


def test_invalid_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="found a file"):
        Tokenizer.load(tmp_path / "file")
    for path in (tmp_path / "none", str(tmp_path / "none"), "runs/of/mine", "./t5", "~/t5"):
        with pytest.raises(UserError, match="found no such directory"):
            Tokenizer.load(path)


def test_tokenizer_config_without_a_class_is_read_as_t5(t5: Path, tmp_path: Path) -> None:
    """In files from 2020 only the model's config.json tells the class."""
    shutil.copy(t5 / "spiece.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512, "extra_ids": 100}')
    found, expected = Tokenizer.load(tmp_path), Tokenizer.load(t5)
    assert [found.encode(text) for text in TEXTS[:5]] == [expected.encode(text) for text in TEXTS[:5]]
    assert found.size == 32100


def test_hub_ids_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def unreachable(name: str, **options: object) -> None:
        asked.append(name)
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    for name in ("no-such-tokenizer-here", "nobody-at-all/no-such-tokenizer"):
        with pytest.raises(UserError, match=rf"^{name}: .*\(no network\);") as caught:
            Tokenizer.load(name)
        assert "\n" not in str(caught.value)
    assert asked == ["no-such-tokenizer-here", "nobody-at-all/no-such-tokenizer"]
