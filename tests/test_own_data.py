"""Files of one's own: templates for the source, rules for the rows, and the text that tasks make of them."""

import itertools
import json

import numpy as np
import pytest
from nltk.stem.porter import PorterStemmer

from pipejax.config import Config, DataConfig, check
from pipejax.data import make_task
from pipejax.data.examples import Example
from pipejax.data.text import Template, keyphrases, plain
from pipejax.system.errors import UserError


def read(tmp_path, content, name="train.jsonl", **settings):
    """The examples of a file."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    task = "csv" if name.endswith(".csv") else "jsonl"
    return make_task(DataConfig(task=task, train=str(path), **settings)).examples("train")


def refusal(tmp_path, content, name="train.jsonl", **settings):
    with pytest.raises(UserError) as caught:
        read(tmp_path, content, name, **settings)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


LINE = json.dumps({"title": "Ice", "text": "It {thaws}.", "answer": "a ;b;; c"})


@pytest.mark.parametrize(
    "content, name, settings, expected",
    [
        ('{"id": 7, "source": "x", "targets": ["a", "b"]}', "a.jsonl", {}, ("7", "x", ("a", "b"))),
        (
            LINE,
            "a.jsonl",
            {"source_template": "T: {title} C: {text}", "targets": "answer", "rows": "delimiter", "delimiter": ";"},
            ("1", "T: Ice C: It {thaws}.", ("a", "b", "c")),
        ),
        (
            'title,id,answer\n"Ice, ""old""",x,"It rained, e.g. on Mr. Ash.\nThen it stopped. Good!"\n',
            "a.csv",
            {"source_template": "{title}", "targets": "answer", "rows": "sentences"},
            ("x", 'Ice, "old"', ("It rained, e.g. on Mr. Ash.", "Then it stopped.", "Good!")),
        ),
        ("\ufeffsource,targets\r\na,\r\n\r\n", "a.csv", {"rows": "delimiter"}, ("2", "a", ())),
        ('source,targets\na,"b\nc d\n\n"\n', "a.csv", {"rows": "delimiter"}, ("2", "a", ("b", "c d"))),
        (
            "source,targets\na," + "b " * 200_000,
            "a.csv",
            {"rows": "delimiter"},
            ("2", "a", (("b " * 200_000).strip(),)),
        ),
    ],
)
def test_read(content, name, settings, expected, tmp_path):
    assert list(read(tmp_path, content, name, **settings)) == [Example(*expected)]


@pytest.mark.parametrize(
    "content, name, settings, words",
    [
        (LINE, "a.jsonl", {"source_template": "{titel}"}, ['a.jsonl:1: found no "titel"', "title, text, answer"]),
        (
            "source,targets\na,b\n",
            "a.csv",
            {"rows": "delimiter", "targets": "rows"},
            ['a.csv: found no "rows" in any record', "keys: source, targets"],
        ),
        (
            LINE,
            "a.jsonl",
            {"source_template": "{title}", "targets": "answer"},
            ['"answer": found text', "list of texts"],
        ),
        ('{"source": "x", "targets": ["a"]}', "a.jsonl", {"rows": "sentences"}, ['"targets": found a list']),
        ("source,targets\na,b\n", "a.csv", {}, ["data.rows: found 'list'"]),
        ("source,targets\na\n", "a.csv", {"rows": "delimiter"}, ["a.csv:2: found 1 columns; expected 2"]),
        ("source,source\na,b\n", "a.csv", {"rows": "delimiter"}, ["a.csv:1: found the column names source, source"]),
        ("source,targets\n", "a.csv", {"rows": "delimiter"}, ["found no lines"]),
        ("", "a.csv", {"rows": "delimiter"}, ["found no lines"]),
        ("source,targets\n,b\n", "a.csv", {"rows": "delimiter"}, ['a.csv:2: "source": found an empty text']),
        (
            b"source,targets\n\xff,b\n",
            "a.csv",
            {"rows": "delimiter"},
            ["a.csv:2: found byte 0xff at column 1; expected UTF-8"],
        ),
        ('source,targets\n"a,b\n', "a.csv", {"rows": "delimiter"}, ["a.csv:", "not CSV"]),
        ("id,source,targets\n1,a,b\n1,a,b\n", "a.csv", {"rows": "delimiter"}, ["a.csv:3", "'1' again", "line 2"]),
        (LINE, "a.jsonl", {"source_template": "{title"}, ["data.source_template: found '{title'"]),
        (LINE, "a.jsonl", {"source_template": "title"}, ["data.source_template: found 'title'", "{title}"]),
        (LINE, "a.jsonl", {"source_template": "{}"}, ["data.source_template"]),
        (LINE, "a.jsonl", {"source_template": "{title!r}"}, ["data.source_template"]),
        (LINE, "a.jsonl", {"source_template": "{title.x}"}, ["data.source_template"]),
    ],
)
def test_refused(content, name, settings, words, tmp_path):
    message = refusal(tmp_path, content, name, **settings)
    assert all(word in message for word in words), message


def test_a_delimiter_is_needed_only_where_it_is_used():
    check(Config(data=DataConfig(delimiter="")), where="here")
    with pytest.raises(UserError, match=r"data\.delimiter: found nothing"):
        check(Config(data=DataConfig(delimiter="", rows="delimiter")), where="here")


def test_the_metric_is_the_tasks_own_or_the_configs():
    assert [make_task(DataConfig(task=task)).metric for task in ("demo", "jsonl", "kp20k", "pubmed")] == [
        "spans",
        "spans",
        "keyphrases",
        "rouge",
    ]
    tasks = [make_task(DataConfig(task=task, metric="rouge", rows="sentences")) for task in ("csv", "jsonl", "msqa")]
    assert {task.metric for task in tasks} == {"rouge"}


def test_a_template_keeps_doubled_braces():
    template = Template("{{x}} {a}{b}", key="k")
    assert template.fields == ("a", "b") and template.fill({"a": "{b}", "b": "2"}) == "{x} {b}2"


def test_plain_text():
    assert plain(" a\n``b''  `c' <digit>\t", (("<digit>", "#"),)) == "a \"b\" 'c' #"


def test_t5_holds_what_is_made_plain(real_data):
    from pipejax.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(real_data / "t5_tokenizer")
    text = plain("``a'' `b' <dig> <cit> il <digit>", (("<digit>", "#"), ("<dig>", "#"), ("<cit>", "[cit]")))
    assert 2 not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert 2 in tokenizer.encode("``a'' <digit>")


def test_keyphrases_in_order_of_appearance():
    """Against every way to place a phrase, on words that often share their stems."""
    rng, stem = np.random.default_rng(0), PorterStemmer().stem
    words = ["graph", "Graphs", "graphing", "tree", "trees", "of", "set", "sets", "unset", "."]
    for _ in range(200):
        document = list(rng.choice(words, rng.integers(0, 12)))
        phrases = [" ".join(rng.choice(words, rng.integers(1, 4))) for _ in range(6)]
        ordered = keyphrases(" ".join(document), phrases)
        stems = [stem(word.lower()) for word in document]

        def places(phrase, stems=stems):
            wanted = [stem(word.lower()) for word in phrase.split()]
            return [i for i in range(len(stems)) if stems[i : i + len(wanted)] == wanted]

        assert sorted(ordered) == sorted(set(phrases))
        present = [phrase for phrase in ordered if places(phrase)]
        assert ordered[: len(present)] == present
        firsts = [places(phrase)[0] for phrase in present]
        assert firsts == sorted(firsts)
        given = {phrase: phrases.index(phrase) for phrase in ordered}
        absent = [given[phrase] for phrase in ordered[len(present) :]]
        assert absent == sorted(absent)
        for a, b in itertools.pairwise(present):  # those of one place as given
            assert places(a)[0] < places(b)[0] or given[a] < given[b]
