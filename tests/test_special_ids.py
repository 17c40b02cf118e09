"""The tokenizer's special ids are compared with the model's in every command, and pieces are compared as well."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

import pipejax
from pipejax import checkpoint
from pipejax.apps import demo
from pipejax.apps.export.programs_as_files import export
from pipejax.config import Config, DataConfig, T5Config, TrainConfig
from pipejax.convert import huggingface
from pipejax.data.tokenizer import Tokenizer, check_special_ids, warn_of_start
from pipejax.system.errors import UserError
from pipejax.training import start
from pipejax.training.loop import fit
from support import oracle, tiny
from support.tokenizer_kinds import train_spiece

pytestmark = pytest.mark.usefixtures("compiled_once")

MODEL = dataclasses.replace(tiny.MODEL, vocab_size=400)
PARAMS = oracle.random_params(MODEL, np.random.default_rng(0))
WORDS = [f"word{i}" for i in range(20)]


def word_level(directory: Path, vocabulary: Sequence[str], unknown: str = "<unk>", **specials: Any) -> Path:
    """A tokenizer of whole words, whose ids are their places in the list."""
    ids = {word: i for i, word in enumerate(vocabulary)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=unknown))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **specials).save_pretrained(directory)
    return directory


def bytes_of_gpt(directory: Path, *, eos: int) -> Path:
    """A tokenizer like GPT-2's: bytes, and one special token for bos, eos and unk, as in T5s from scratch."""
    end = "<|endoftext|>"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    alphabet.insert(eos, end)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    specials = {"bos_token": end, "eos_token": end, "unk_token": end}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **specials).save_pretrained(directory)
    return directory


def spiece(directory: Path, **settings: Any) -> Path:
    """Only a spiece.model with custom special ids, trained by sentencepiece."""
    directory.mkdir(exist_ok=True)
    text = "the quick brown fox jumps over a lazy dog and sleeps under warm bright summer skies by rivers "
    return train_spiece(directory, text, 44, **settings)


def byt5(directory: Path) -> Path:
    transformers.ByT5Tokenizer().save_pretrained(directory)
    return directory


def run_of(directory: Path, tokenizer: Path | None, model: T5Config = MODEL, **train: Any) -> Path:
    """A run directory as after `pipejax train`; writing it compares nothing."""
    settings = {"method": "sequential", **train}
    config = Config(model=model, data=DataConfig(task="demo"), train=TrainConfig(**settings), mesh=tiny.RUN_ON_ONE.mesh)
    checkpoint.save_params(directory, config, PARAMS, tokenizer_source=tokenizer)
    return directory


Make = Callable[[Path], Path]
EOS = {"eos_token": "</s>", "unk_token": "<unk>"}
# The tokenizer, the model's eos, and words of the refusal.
CONTRADICTIONS: dict[str, tuple[Make, int, tuple[str, ...]]] = {
    "the word at eos": (
        lambda d: word_level(d, ["<pad>", "the", "</s>", "<unk>", *WORDS], pad_token="<pad>", **EOS),
        1,
        ("found 1, which is 'the' in", "'</s>' = 2 ends a text"),
    ),
    "sentencepiece as it is by itself": (spiece, 1, ("found 1, which is '<s>' in", "'</s>' = 2 ends a text")),
    "T5's beside another model's eos": (
        lambda d: spiece(d, pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
        2,
        ("found 2, which is '<unk>' in", "'</s>' = 1 ends a text"),
    ),
    "a byte at eos": (byt5, 100, ("found 100, which is 'a' in", "'</s>' = 1 ends a text")),
    "an eos beyond the tokenizer": (
        lambda d: word_level(d, ["<pad>", "</s>", "<unk>", *WORDS], **EOS),
        300,
        ("found 300, which is not an id of", "'</s>' = 1 ends a text"),
    ),
    "a word, and no eos at all": (
        lambda d: word_level(d, ["<pad>", "the", "<unk>", *WORDS], unk_token="<unk>"),
        1,
        ("found 1, which is 'the' in", "expected an id without text"),
    ),
    "the unknown's id": (
        lambda d: word_level(d, ["<pad>", "<unk>", *WORDS], unk_token="<unk>", pad_token="<pad>"),
        1,
        ("found 1, which is '<unk>' in", "is also its unknown token"),
    ),
    "eos and unknown in one": (
        lambda d: word_level(d, ["<pad>", "</s>", *WORDS], unknown="</s>", eos_token="</s>", unk_token="</s>"),
        1,
        ("found 1, which is '</s>' in", "is also its unknown token"),
    ),
}
# The tokenizer, and the model's eos and start.
AGREEMENTS: dict[str, tuple[Make, int, int]] = {
    "the demo's": (lambda d: demo.build_tokenizer(d) or d, 1, 0),  # type: ignore[func-returns-value]
    "byt5": (byt5, 1, 0),
    "sentencepiece as for mT5": (lambda d: spiece(d, pad_id=0, eos_id=1, unk_id=2, bos_id=-1), 1, 0),
    "sentencepiece as it is, beside its own ids": (lambda d: spiece(d), 2, 1),
    "codet5": (
        lambda d: word_level(
            d, ["<pad>", "<s>", "</s>", "<unk>", *WORDS], bos_token="<s>", pad_token="<pad>", sep_token="</s>", **EOS
        ),
        2,
        0,
    ),
    "bytes of GPT-2's, one token for all": (lambda d: bytes_of_gpt(d, eos=256), 256, 256),
    "no pad": (lambda d: word_level(d, ["<s>", "</s>", "<unk>", *WORDS], **EOS), 1, 0),
    "no eos declared": (lambda d: word_level(d, ["<pad>", "</s>", "<unk>", *WORDS], unk_token="<unk>"), 1, 0),
    "an eos of which the tokenizer knows nothing": (
        lambda d: word_level(d, ["<pad>", "<unk>", *WORDS], unk_token="<unk>", pad_token="<pad>"),
        300,
        0,
    ),
    "square brackets": (
        lambda d: word_level(d, ["[PAD]", "[EOS]", "[UNK]", *WORDS], unknown="[UNK]", unk_token="[UNK]"),
        1,
        0,
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer directory for each case; tests do not change it."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = {**{name: case[0] for name, case in CONTRADICTIONS.items()}, **{n: c[0] for n, c in AGREEMENTS.items()}}
    return {name: make(root / str(i)) for i, (name, make) in enumerate(made.items())}


def hugging_face(directory: Path, tokenizer: Path, model: T5Config) -> Path:
    huggingface.write_hf(model, PARAMS, directory, tokenizer)
    return directory


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_different_end_tokens_are_refused(case: str, directories: dict[str, Path], tmp_path: Path) -> None:
    """The line names both files and both ids."""
    _, eos, words = CONTRADICTIONS[case]
    source = hugging_face(tmp_path / "hf", directories[case], dataclasses.replace(MODEL, eos_token_id=eos))
    with pytest.raises(UserError) as caught:
        huggingface.from_hf(source, tmp_path / "out")
    message = str(caught.value)
    assert message.startswith(f"{source}/generation_config.json: eos_token_id: found {eos}")
    assert f" the tokenizer of {source}" in message or f"not an id of the tokenizer of {source}" in message
    assert "\n" not in message and all(word in message for word in words), message
    assert not (tmp_path / "out").exists()


def test_every_entry_point_compares_special_ids(directories: dict[str, Path], tmp_path: Path) -> None:
    files = directories["the word at eos"]
    run, bare = run_of(tmp_path / "run", files), run_of(tmp_path / "bare", None)
    base = Config(data=DataConfig(task="jsonl", tokenizer=str(files)), train=TrainConfig(steps=1))
    own = dataclasses.replace(base, data=DataConfig(task="jsonl"), train=TrainConfig(init_from=str(run)))
    random = dataclasses.replace(base, model=MODEL)
    begun = dataclasses.replace(base, train=TrainConfig(init_from=str(bare)))
    doors: dict[str, tuple[Callable[[], Any], str]] = {
        "load": (lambda: pipejax.load(run), f"{run}: model.eos_token_id"),
        "to-hf": (lambda: huggingface.to_hf(run, tmp_path / "hf"), f"{run}: model.eos_token_id"),
        "export": (lambda: export(run, tmp_path / "x", platforms=["cpu"]), f"{run}: model.eos_token_id"),
        "random weights": (lambda: start._prepare_trainer(random), "model.eos_token_id"),
        "init_from": (lambda: start._prepare_trainer(own), f"{run}: model.eos_token_id"),
        "init_from without a tokenizer": (lambda: start._prepare_trainer(begun), f"{bare}: model.eos_token_id"),
    }
    for name, (door, place) in doors.items():
        with pytest.raises(UserError) as caught:
            door()
        assert str(caught.value).startswith(f"{place}: found 1, which is 'the' in "), name
    assert not (tmp_path / "hf").exists() and not (tmp_path / "x").exists()


@pytest.mark.parametrize("case", AGREEMENTS)
def test_matching_tokenizers_pass(case: str, directories: dict[str, Path], said: list[str]) -> None:
    _, eos, begin = AGREEMENTS[case]
    model = dataclasses.replace(MODEL, eos_token_id=eos, decoder_start_token_id=begin)
    tokenizer = Tokenizer.load(directories[case])
    check_special_ids(tokenizer, model, "model.eos_token_id", "it")
    warn_of_start(tokenizer, model, "model.decoder_start_token_id", "it")
    assert not said


CHAT = ["<pad>", "</s>", "<unk>", "<end_of_turn>", "<over>", *WORDS]


@pytest.mark.parametrize(
    "ends, line",
    [
        ([1, 3], ""),
        ([3, 1], ""),
        ([4, 3, 1], ""),
        ([1, 300], ""),  # a token that the tokenizer lacks, so no text has it
        ([3, 4], "found 3, 4; expected ids that include 1, since '</s>' = 1 ends a text in the tokenizer of"),
        ([1, 7], "found 7, which is 'word2' in the tokenizer of"),
        ([1, 2], "found 2, which is '<unk>' in the tokenizer of"),
    ],
)
def test_each_end_token_is_compared(ends: list[int], line: str, tmp_path: Path) -> None:
    """Several tokens are correct if the tokenizer's eos is among them, and each has no text."""
    files = word_level(
        tmp_path / "tokenizer", CHAT, pad_token="<pad>", additional_special_tokens=["<end_of_turn>"], **EOS
    )
    model = dataclasses.replace(MODEL, eos_token_id=ends[0], other_eos_token_ids=(*ends[1:],))
    source = hugging_face(tmp_path / "hf", files, model)
    if line:
        with pytest.raises(UserError) as caught:
            huggingface.from_hf(source, tmp_path / "out")
        said = str(caught.value)
        assert said.startswith(f"{source}/generation_config.json: eos_token_id: {line}") and "\n" not in said
        return
    huggingface.from_hf(source, tmp_path / "out")
    t5 = pipejax.load(tmp_path / "out")
    assert t5.tokenizer is not None and t5.ids.ends == (*ends,)
    assert t5.ids_of(t5.source("word1 word2", "here", 0)) == [6, 7]  # its tokenizer adds nothing
    assert t5.tokenizer.vanishes("</s> <end_of_turn>", t5.ids.ends) == (3 in ends)
    assert not t5.tokenizer.vanishes("<end_of_turn> word1", t5.ids.ends)


@pytest.mark.slow
def test_trained_end_token_becomes_first_of_run(tmp_path: Path) -> None:
    """`train.eos_token_id` names an end token of the checkpoint: rows end with it, and sources do not change."""
    files = word_level(tmp_path / "chat", CHAT, pad_token="<pad>", **EOS)
    origin = run_of(tmp_path / "origin", files, dataclasses.replace(MODEL, other_eos_token_ids=(3,)), method="none")
    (tmp_path / "train.jsonl").write_text('{"source": "word1", "targets": ["word2", "word3"]}\n')
    wanted: dict[str, Any] = {
        "init_from": str(origin),
        "method": "pipelined",
        "steps": 1,
        "batch_size": 1,
        "log_every": 1,
    }
    config = Config(
        data=DataConfig(task="jsonl", train=str(tmp_path / "train.jsonl")),
        train=TrainConfig(**wanted, eos_token_id=3, evaluate_every=9),
        mesh=tiny.RUN_ON_ONE.mesh,
    )
    with pytest.raises(UserError, match=r"^train\.eos_token_id: found 7; expected an end token of the model, 1 or 3"):
        start._prepare_trainer(dataclasses.replace(config, train=TrainConfig(**wanted, eos_token_id=7)))
    assert fit(config, tmp_path / "run") == 0
    saved = checkpoint.open_run(tmp_path / "run").config
    assert saved.model is not None and saved.model.end_token_ids == (3, 1)
    assert fit(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2)), tmp_path / "run") == 0
    t5 = pipejax.load(tmp_path / "run")
    assert t5.ids.ends == (3, 1) and t5.ids_of(t5.source("word1", "here", 0)) == [6]
    huggingface.to_hf(tmp_path / "run", tmp_path / "hf")
    assert huggingface.read_hf(tmp_path / "hf")[0].end_token_ids == (3, 1)


def test_the_real_tokenizer_of_t5_passes(real_data: Path, tmp_path: Path, said: list[str]) -> None:
    files, model = real_data / "t5_tokenizer", dataclasses.replace(MODEL, vocab_size=32128)
    params = oracle.random_params(model, np.random.default_rng(0))
    huggingface.write_hf(model, params, tmp_path / "hf", files)
    huggingface.from_hf(tmp_path / "hf", tmp_path / "out")
    assert pipejax.load(tmp_path / "out").tokenizer and not said
    shutil.copytree(tmp_path / "hf", tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "bare" / name).unlink()
    huggingface.from_hf(tmp_path / "bare", tmp_path / "from-bare")
    one, two = (Tokenizer.load(tmp_path / name / "tokenizer") for name in ("out", "from-bare"))
    assert one.other_pieces(two) == two.other_pieces(one) == [] and not said


@pytest.mark.parametrize(
    "vocabulary, specials, begin, piece",
    [
        (["the", "</s>", "<unk>", "<pad>"], {"pad_token": "<pad>"}, 0, "'the'"),
        (["<unk>", "</s>", "<pad>", "the"], {"pad_token": "<pad>"}, 0, "'<unk>'"),
        (["<unk>", "</s>", "the"], {}, 2, "'the'"),
    ],
)
def test_start_token_that_is_text_is_used_and_reported(
    vocabulary: list[str], specials: dict[str, str], begin: int, piece: str, tmp_path: Path, said: list[str]
) -> None:
    model = dataclasses.replace(MODEL, decoder_start_token_id=begin)
    files = word_level(tmp_path / "tokenizer", [*vocabulary, *WORDS], **EOS, **specials)
    source = hugging_face(tmp_path / "hf", files, model)
    huggingface.from_hf(source, tmp_path / "out")
    [line] = said
    assert line.startswith(
        f"warning: {source}/generation_config.json: decoder_start_token_id: found {begin}, which is "
    )
    assert piece in line and "it is used" in line
    said.clear()
    assert pipejax.load(tmp_path / "out").architecture.decoder_start_token_id == begin and not said  # said once


def test_a_run_that_was_trained_with_two_ends_still_opens(
    directories: dict[str, Path], tmp_path: Path, said: list[str]
) -> None:
    """The model's eos, `<s>`, ended all rows in training. Such a run is not exported: transformers would use 2."""
    files = directories["sentencepiece as it is by itself"]
    run, converted = run_of(tmp_path / "run", files), run_of(tmp_path / "converted", files, method="none")
    assert pipejax.load(run).architecture.eos_token_id == 1
    begun = Config(data=DataConfig(task="jsonl"), train=TrainConfig(init_from=str(run)))
    copied = dataclasses.replace(begun, data=DataConfig(task="jsonl", tokenizer=str(files)))
    assert start._prepare_trainer(begun)[1].eos == start._prepare_trainer(copied)[1].eos == 2
    for door in (lambda: huggingface.to_hf(run, tmp_path / "hf"), lambda: pipejax.load(converted)):
        with pytest.raises(UserError, match=r"model\.eos_token_id: found 1, which is '<s>' in .* = 2 ends a text"):
            door()
    assert [line for line in said if "eos" in line] == []


# The tokenizer of a checkpoint to start from, and another one.


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a tokenizer of words."""
    root = tmp_path_factory.mktemp("begun")
    return run_of(
        root / "run", word_level(root / "words", ["<pad>", "</s>", "<unk>", *WORDS], pad_token="<pad>", **EOS)
    )


def settings(begun: Path, tokenizer: Path, **more: Any) -> Config:
    train = TrainConfig(init_from=str(begun), **more.pop("train", {}))
    file = str(more.pop("train_file", ""))
    return Config(data=DataConfig(task="jsonl", tokenizer=str(tokenizer), train=file, **more), train=train)


def test_another_tokenizer_is_refused(begun: Path, tmp_path: Path) -> None:
    swapped = ["<pad>", "</s>", "<unk>", *WORDS[:5], *reversed(WORDS[5:])]  # the sentinel in the middle stays
    files = word_level(tmp_path / "other", swapped, pad_token="<pad>", **EOS)
    (tmp_path / "train.jsonl").write_text('{"source": "word1", "targets": ["word2"]}\n')
    with pytest.raises(UserError) as caught:
        fit(settings(begun, files, train_file=tmp_path / "train.jsonl"), tmp_path / "run")
    different = sum(a != b for a, b in zip(WORDS, swapped[3:], strict=True))
    assert different == 14
    assert str(caught.value) == (
        f"data.tokenizer={files}: 14 of its 23 ids stand for other pieces than in the tokenizer of {begun} "
        "(8: 'word19', there 'word5'); expected the tokenizer of that checkpoint, or data.new_tokenizer=true to train "
        "with another tokenizer"
    )
    assert not (tmp_path / "run").exists()


def test_tokenizer_of_a_task_is_compared(begun: Path) -> None:
    config = dataclasses.replace(settings(begun, Path()), data=DataConfig(task="demo"))
    with pytest.raises(UserError, match=r"^the tokenizer of data\.task=demo: 20 of its \d+ ids stand for other pieces"):
        start._prepare_trainer(config)


@pytest.mark.parametrize(
    "words, train, counted, hint",
    [
        (list(reversed(WORDS)), {}, 20, "must be learned again"),
        ([f"▁{word}" for word in WORDS], {"freeze": "encoder"}, 20, "but train.freeze leaves the table unchanged"),
        (["other", *WORDS[1:]], {"lora_rank": 2}, 1, "but train.lora_rank leaves the table unchanged"),
    ],
)
def test_other_tokenizer_is_used_on_request(
    words: list[str], train: dict[str, Any], counted: int, hint: str, begun: Path, tmp_path: Path, said: list[str]
) -> None:
    files = word_level(tmp_path / "other", ["<pad>", "</s>", "<unk>", *words], pad_token="<pad>", **EOS)
    _, tokenizer, _ = start._prepare_trainer(settings(begun, files, new_tokenizer=True, train=train))
    assert tokenizer.encode(words[0]) == [3]
    [line] = said
    assert line.startswith(f"warning: data.tokenizer={files}: {counted} of its 23 ids stand for") and line.endswith(
        hint
    )


def copied(begun: Path, out: Path) -> Path:
    return Path(shutil.copytree(begun / "tokenizer", out))


def saved_anew(begun: Path, out: Path) -> Path:
    Tokenizer.load(begun / "tokenizer").save(out)
    return out


def by_another_class(begun: Path, out: Path) -> Path:
    """The vocabulary in other files without information about special tokens."""
    inner = tokenizers.Tokenizer.from_file(str(begun / "tokenizer" / "tokenizer.json"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(out)
    return out


def with_more_pieces(begun: Path, out: Path) -> Path:
    inner = transformers.AutoTokenizer.from_pretrained(begun / "tokenizer")
    inner.add_tokens(["<sep>", "something"])
    inner.save_pretrained(out)
    return out


@pytest.mark.parametrize("form", [copied, saved_anew, by_another_class, with_more_pieces])
def test_the_same_tokenizer_in_another_form_passes(
    form: Callable[[Path, Path], Path], begun: Path, tmp_path: Path, said: list[str]
) -> None:
    _, tokenizer, _ = start._prepare_trainer(settings(begun, form(begun, tmp_path / "same")))
    assert tokenizer.encode("word3 word19") == [6, 22] and not said


def test_forms_of_a_sentencepiece_model(directories: dict[str, Path], tmp_path: Path) -> None:
    """The forms are only spiece.model, and the tokenizer.json that transformers makes from it."""
    files = directories["sentencepiece as for mT5"]
    run = run_of(tmp_path / "run", files)
    Tokenizer.load(files).save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "spiece.model").exists()
    start._prepare_trainer(settings(run, tmp_path / "saved"))
    other = spiece(tmp_path / "other", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, model_type="char")
    with pytest.raises(UserError, match="ids stand for other pieces"):
        start._prepare_trainer(settings(run, other))


def test_a_damaged_tokenizer_of_the_checkpoint_can_be_replaced(begun: Path, tmp_path: Path, said: list[str]) -> None:
    """The refusal of changed files advises this."""
    run = Path(shutil.copytree(begun, tmp_path / "run"))
    good = copied(begun, tmp_path / "good")
    (run / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="found other content; expected what was saved"):
        start._prepare_trainer(dataclasses.replace(settings(run, good), data=DataConfig(task="jsonl")))
    assert start._prepare_trainer(settings(run, good))[1].encode("word0") == [3]
    [line] = said
    assert f"data.tokenizer={good} is used without a comparison" in line
