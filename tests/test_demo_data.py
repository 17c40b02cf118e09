"""The embedded tasks: determinism, disjoint splits, and answers that follow from the note."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipejax.apps import demo
from pipejax.apps.demo import (
    ADJECTIVES,
    BASKETS,
    CUE,
    LONG_ROW_WORDS,
    LONG_ROWS,
    LONG_WORDS,
    MAX_ROW_WORDS,
    MAX_ROWS,
    MAX_SOURCE_WORDS,
    NOUNS,
    NUMBERS,
    SIZES,
    WORDS,
    examples,
)
from pipejax.config import DataConfig
from pipejax.data import make_task


def test_first_note_is_unchanged() -> None:
    first = examples("dev")[0]
    assert first.source == (
        "deliver old white lamps . deliver tiny blue candles . the driver rested behind the garden . "
        "deliver small fine honey . deliver new green shoes ."
    )
    assert first.targets == ("old white lamps", "tiny blue candles", "small fine honey", "new green shoes")


def test_first_long_note_is_unchanged() -> None:
    first = make_task(DataConfig(task="demo_long")).examples("dev")[0]
    assert first.source == (
        "deliver the supper basket . deliver the winter basket . deliver the birthday basket . "
        "deliver the village basket . the teacher slept by the market . deliver the travel basket . "
        "deliver the school basket ."
    )
    assert first.targets == (
        "birthday three ropes eight books four green maps",
        "school five green maps three books",
        "supper four white coins seven maps five pears",
        "travel three green maps nine white roses eight bells",
        "village three blue tiles seven white shoes",
        "winter six green coins seven red ropes",
    )


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_splits_and_seeds_share_no_note(long: bool) -> None:
    notes = {split: [example.source for example in examples(split, long=long)] for split in SIZES}
    assert [len(notes[split]) for split in ("train", "dev", "test")] == [20_000, 256, 512]
    every = list(itertools.chain(*notes.values()))
    assert len(set(every)) == len(every)
    other_seed = {example.source for example in examples("train", seed=1, long=long)[:2000]}
    assert not other_seed & {*notes["dev"], *notes["test"]}


def test_answers_follow_the_cue() -> None:
    things = {*itertools.chain(*ADJECTIVES), *NOUNS}
    rows: set[int] = set()
    lengths: set[int] = set()
    for example in examples("train")[:2000]:
        words = example.source.split()
        assert set(words) <= set(WORDS)
        assert 24 <= len(words) <= MAX_SOURCE_WORDS
        found = [
            " ".join(itertools.takewhile(things.__contains__, words[i + 1 :]))
            for i, word in enumerate(words)
            if word == CUE
        ]
        assert tuple(found) == example.targets
        assert len(set(found)) == len(found)
        rows.add(len(found))
        lengths.update(len(row.split()) for row in found)
    assert rows == set(range(1, MAX_ROWS + 1))
    assert lengths == set(range(1, MAX_ROW_WORDS + 1))


def test_no_word_is_in_two_answers() -> None:
    for example in examples("test"):
        words = [word for row in example.targets for word in row.split()]
        assert len(set(words)) == len(words)
        assert all(example.source.split().count(word) == 1 for word in words)


def test_long_answers_are_the_baskets_that_a_note_asks_for() -> None:
    rows: set[int] = set()
    for example in examples("train", long=True)[:2000]:
        assert set(example.source.split()) <= set(LONG_WORDS)
        names = re.findall(rf"{CUE} the (\w+) basket \.", example.source)
        assert example.targets == tuple(BASKETS[name] for name in sorted(names))
        assert len(set(names)) == len(names) == example.source.split().count(CUE)
        rows.add(len(names))
    assert rows == set(range(LONG_ROWS[0], LONG_ROWS[1] + 1))


def test_baskets_differ_and_have_a_number_of_each_item() -> None:
    thing = rf"({'|'.join(NUMBERS)})( ({'|'.join(ADJECTIVES[2])}))? ({'|'.join(n for n in NOUNS if n[-1] == 's')})"
    for name, row in BASKETS.items():
        assert re.fullmatch(rf"{name}( {thing}){{2,3}}", row), row
    assert len({row.partition(" ")[2] for row in BASKETS.values()}) == len(BASKETS)
    assert {len(row.split()) for row in BASKETS.values()} == set(range(LONG_ROW_WORDS[0], LONG_ROW_WORDS[1] + 1))


def test_an_example_depends_on_nothing_but_split_index_and_seed() -> None:
    backwards = [examples("test")[i] for i in reversed(range(5))]
    demo._example.cache_clear()
    assert backwards[::-1] == [examples("test")[i] for i in range(5)] == list(examples("test")[:5])
    assert examples("test")[-1] == examples("test")[511]
    assert examples("test", seed=1)[0].source != examples("test")[0].source != examples("dev")[0].source
    assert examples("test", long=True)[3] == examples("test", long=True)[:4][3] != examples("test")[3]
    with pytest.raises(IndexError):
        examples("test")[512]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="train, dev, test; got 'valid'"):
        examples("valid")
    with pytest.raises(ValueError, match="seed: expected at least 0; got -1"):
        examples("dev", seed=-1)


@pytest.mark.parametrize("long, words", [(False, WORDS), (True, LONG_WORDS)])
def test_tokenizer_has_the_words_of_the_task(long: bool, words: tuple[str, ...]) -> None:
    tokenizer = demo.DemoTask(long=long).tokenizer()
    assert tokenizer.size == 4 + len(set(words)) == 4 + len(words)
    assert tokenizer.encode(";") == [3]
    assert tokenizer.encode("unheard the") == [2, tokenizer.encode("the")[0]]
    for example in examples("dev", long=long):
        for text in (example.source, f" {demo.SEPARATOR} ".join(example.targets)):
            assert tokenizer.decode([0, *tokenizer.encode(text), 1]) == text


def test_the_tokenizer_is_an_ordinary_one(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    demo.build_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer("; the").input_ids == [3, tokenizer.convert_tokens_to_ids("the"), 1]


def test_reading_notes_starts_no_tokenizer() -> None:
    script = (
        "import sys, pipejax.apps.demo as demo; demo.examples('dev')[0]; "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], check=True)
