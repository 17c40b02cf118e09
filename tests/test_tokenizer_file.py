"""tokenizer.json is read without transformers, and equals transformers' tokenizer of the same directory."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from pipejax.data.tokenizer import Tokenizer
from pipejax.data.tokenizer_file import TokenizerFile
from support.tokenizer_kinds import T5_IDS, train_spiece

TEXT = "the quick brown fox jumps over a lazy dog and sleeps under warm bright summer skies by rivers "
Change = Callable[[Any, Any], object]  # of the contents of tokenizer.json and tokenizer_config.json


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer of each kind, as transformers saves it."""
    root = tmp_path_factory.mktemp("kinds")
    train_spiece(root, TEXT, 60, **T5_IDS)
    transformers.T5Tokenizer.from_pretrained(root, extra_ids=20).save_pretrained(root / "t5")

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(["<pad>", "</s>", "<unk>", *TEXT.split()])}, "<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.normalizer = tokenizers.normalizers.Lowercase()
    words.add_tokens([tokenizers.AddedToken("Lazy Dog", normalized=True), tokenizers.AddedToken("ox", lstrip=True)])
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(root / "words")

    alphabet = ["<|endoftext|>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = tokenizers.decoders.ByteLevel()
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), alphabet[0])
    transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, **end).save_pretrained(root / "bytes")
    return {name: root / name for name in ("t5", "words", "bytes")}


def old_form(content: dict[str, Any], settings: dict[str, Any]) -> None:
    """T5's tokenizer as transformers 4 wrote it: transformers 5 reads only the normalisation of characters from it."""
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [content["normalizer"], strip, spaces]}
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    settings |= {"sp_model_kwargs": {}, "legacy": True, "clean_up_tokenization_spaces": True, "add_prefix_space": True}
    settings["tokenizer_class"] = "T5TokenizerFast"


def declared(content: dict[str, Any], settings: dict[str, Any]) -> None:
    """The settings as transformers 4 wrote them, with the added tokens."""
    settings["added_tokens_decoder"] = {
        str(token["id"]): {key: x for key, x in token.items() if key != "id"} for token in content["added_tokens"]
    }


def one_more(content: dict[str, Any], settings: dict[str, Any]) -> None:
    number = max(token["id"] for token in content["added_tokens"]) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"].append({"id": number, "content": "<new>", **flags})


# These files are read without transformers.
PLAIN: dict[str, tuple[str, list[Change]]] = {
    "t5": ("t5", []),
    "t5 as of old": ("t5", [old_form, declared]),
    "t5 of the oldest": ("t5", [old_form]),
    "words": ("words", []),
    "bytes": ("bytes", []),
    "cut and cleaned": (
        "words",
        [
            lambda c, s: s.update(clean_up_tokenization_spaces=True, model_max_length=3, padding_side="left"),
            lambda c, s: c.update(
                truncation={"direction": "Left", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
            ),
        ],
    ),
    "special tokens as text": ("words", [lambda c, s: s.update(split_special_tokens=True)]),
    "a sentinel that takes the spaces": (
        "t5",
        [lambda c, s: c["added_tokens"][-1].update(lstrip=True, rstrip=True), declared],
    ),
    "one more special token": ("t5", [one_more, lambda c, s: s.update(mask_token="<new>")]),
    "one more word": ("words", [one_more, declared]),
}
# transformers may read these differently from the file alone.
OTHERS: dict[str, tuple[str, list[Change]]] = {
    "added in the settings": ("t5", [one_more, declared, lambda c, s: c["added_tokens"].pop()]),
    "added in the file": ("words", [declared, one_more]),
    "another flag": ("t5", [lambda c, s: c["added_tokens"][-1].update(special=False)]),
    "more sentinels": ("t5", [lambda c, s: s.pop("extra_special_tokens"), lambda c, s: s.update(extra_ids=30)]),
    "an end that is no special token": ("words", [lambda c, s: s.update(eos_token="fox")]),
    "a token that is not there": ("words", [lambda c, s: s.update(sep_token="<sep>")]),
    "no space before a text": (
        "t5",
        [lambda c, s: c["pre_tokenizer"]["pretokenizers"][1].update(prepend_scheme="never")],
    ),
    "bytes for what it lacks": ("t5", [lambda c, s: c["model"].update(byte_fallback=True)]),
    "a setting of other classes": ("t5", [lambda c, s: s.update(do_lower_case=True)]),
    "no class": ("words", [lambda c, s: s.pop("tokenizer_class")]),
    "another class": ("words", [lambda c, s: s.update(tokenizer_class="BertTokenizer")]),
    "padding": (
        "words",
        [
            lambda c, s: c.update(
                padding={
                    "strategy": "BatchLongest",
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "<pad>",
                }
            )
        ],
    ),
}


def changed(source: Path, target: Path, changes: list[Change]) -> Path:
    shutil.copytree(source, target)
    files = [target / "tokenizer.json", target / "tokenizer_config.json"]
    contents = [json.loads(file.read_text()) for file in files]
    for change in changes:
        change(*contents)
    for file, content in zip(files, contents, strict=True):
        file.write_text(json.dumps(content))
    return target


def texts() -> list[str]:
    """Pieces, special tokens, and characters that normalisation or splitting into words may change, in any order."""
    rng = random.Random(5)
    parts = [*TEXT.split(), "Lazy Dog", "lazy dog", "ox", "</s>", "<pad>", "<unk>", "<extra_id_0>", "<extra_id_19>"]
    parts += [
        "ﬁ",
        "½",
        "中文",
        "🙂",
        "▁",
        "e\u0301",
        "\u00a0",
        "\u200b",
        "\n",
        "\t",
        "  ",
        " ",
        " ",
        "<new>",
        "QUICK",
        ".",
    ]
    return ["".join(rng.choices(parts, k=rng.randrange(12))) for _ in range(400)]


def check_same(ours: Tokenizer, theirs: Any, directory: Path) -> None:
    assert ours.size == max(theirs.get_vocab().values()) + 1
    assert (ours.eos, ours.unknown) == (theirs.eos_token_id, theirs.unk_token_id)
    assert ours.affixes.around([]) == theirs("").input_ids
    rng, again = random.Random(6), Tokenizer.load(directory)
    for text in texts():
        ids = theirs(text, add_special_tokens=False, verbose=False).input_ids
        assert ours.encode(text) == again.encode(text) == ids, text
        ids = [rng.randrange(ours.size) for _ in range(rng.randrange(9))]
        found = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
        assert ours.decode(ids) == again.decode(ids) == found, ids
    for i in range(ours.size):
        assert ours.piece(i) == (theirs.convert_ids_to_tokens(i) or "")
        assert not (ours.is_word(i) and i in theirs.all_special_ids)


@pytest.mark.parametrize("case", PLAIN)
def test_tokenizer_file_equals_transformers(case: str, made: dict[str, Path], tmp_path: Path, said: list[str]) -> None:
    kind, changes = PLAIN[case]
    directory = changed(made[kind], tmp_path / "changed", changes)
    ours = Tokenizer.load(directory)
    assert isinstance(ours._inner, TokenizerFile) and not said
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    for place in (directory, tmp_path / "saved"):
        check_same(ours, transformers.AutoTokenizer.from_pretrained(place), place)


@pytest.mark.parametrize("case", OTHERS)
def test_files_that_may_differ_are_read_by_transformers(case: str, made: dict[str, Path], tmp_path: Path) -> None:
    kind, changes = OTHERS[case]
    directory = changed(made[kind], tmp_path / "changed", changes)
    ours = Tokenizer.load(directory)
    assert not isinstance(ours._inner, TokenizerFile)
    check_same(ours, transformers.AutoTokenizer.from_pretrained(directory), directory)


@pytest.mark.parametrize("name, content", [("config.json", {"model_type": "t5"}), ("added_tokens.json", {})])
def test_other_files_that_affect_ids_are_read_by_transformers(
    name: str, content: object, made: dict[str, Path], tmp_path: Path
) -> None:
    directory = changed(made["t5"], tmp_path / "changed", [])
    (directory / name).write_text(json.dumps(content))
    assert not isinstance(Tokenizer.load(directory)._inner, TokenizerFile)


def test_published_t5_tokenizer_equals_transformers(real_data: Path) -> None:
    directory = real_data / "t5_tokenizer"
    ours = Tokenizer.load(directory)
    assert isinstance(ours._inner, TokenizerFile)
    check_same(ours, transformers.AutoTokenizer.from_pretrained(directory), directory)
