"""Small files in the layouts of the publishers of data sets, and the examples that follow from them."""

import hashlib
import json
import zipfile
from typing import Any


def official(name, question, context, labels):
    return {
        "id": name,
        "type": "HUM",
        "question": question.split(),
        "context": context.split(),
        "num_span": labels.count("B"),
        "label": list(labels),
    }


def wrapped(*records):
    return json.dumps({"version": 1.0, "data": records})


def in_lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def story(url):
    return f"cnn/stories/{hashlib.sha1(url.encode()).hexdigest()}.story"


MSQA = official("a", "who `` sang ''", "Ann and Bob the elder sang", "BOBIIO")
TRAIN = [official(f"t{i}", "who ?", "Ann sang", "BO") for i in range(17)]
KEYWORDS = {"title": "Graph # one", "abstract": "Sets of trees.", "keyword": "absent thing;tree;graph"}
NEWS = {"id": "ny1", "title": "Ice", "abstract": "The US thaws.", "keyword": [["Climate"], ["US", "America"], ["ice"]]}
HOW_TO = "\n".join(["How to be  calm\ta1\t1", "How to be calm\ta2\t0", "How to run\ta2\t1"]) + "\n"
SUMMARIES = "a1\tbreathe slowly. it helps.\tbreathe. wait for e.g. a minute. done.\na2\tgo out and run.\trun.\n"
STORY = "By Ann\n\nIt rained.\n\n@highlight\n\nRain fell\n\n@highlight\n\nAll got wet .\n"
PAPER = {
    "article_id": "p1",
    "article_text": ["we saw", "mice ."],
    "abstract_text": ["<S> mice ran . </S>", "<S> cats sat . </S>"],
    "section_names": ["intro"],
    "labels": None,
}
HEADLINES = (
    '"\nBuy paper.,\nPaint it","How to Paint1","Go to a shop that sells paper...\n\n, Then paint, and paint more."\n'
)

# Files in the publisher's layout, and their examples: (id, source, rows).
CASES: dict[str, Any] = {
    "msqa": (
        {"MultiSpanQA_data/train.json": wrapped(*TRAIN), "MultiSpanQA_data/valid.json": wrapped(MSQA)},
        {"test": [("a", 'Question: who " sang " Context: Ann and Bob the elder sang', ("Ann", "Bob the elder"))]},
    ),
    "kp20k": (
        {
            "train_src.txt": "a <digit> graph . <eos> trees and <digit> graphs\n\nb <eos> c\n",
            "train_trg.txt": "<peos>;absent\n\nnone;b;none\n",
            "test_src.txt": "trees <eos> and c <digit> of graph theory\n",
            "test_trg.txt": "c <digit>;absent;theory of graphs;tree;<peos>;graph theory\n",
        },
        {
            "train": [
                ("train-0", "Title: a # graph . Context: trees and # graphs", ("absent",)),
                ("train-2", "Title: b Context: c", ("b", "none")),
            ],
            "dev": [],
            "test": [
                (
                    "test-0",
                    "Title: trees Context: and c # of graph theory",
                    ("tree", "c #", "graph theory", "absent", "theory of graphs"),
                )
            ],
        },
    ),
    "kptimes": (
        {
            "train.jsonl": in_lines(NEWS),
            "test_NYTimes.jsonl": in_lines(NEWS | {"id": "ny2", "keyword": "ice;US,America"}),
            "test_JPTimes.jsonl": in_lines(NEWS | {"id": "jp1", "keyword": []}),
        },
        {
            "train": [("ny1", "Title: Ice Context: The US thaws.", ("ice", "Climate", "US,America"))],
            "test": [
                ("ny2", "Title: Ice Context: The US thaws.", ("ice", "US,America")),
                ("jp1", "Title: Ice Context: The US thaws.", ()),
            ],
        },
    ),
    "wikihowqa": (
        {"train.txt": HOW_TO, "summary.txt": SUMMARIES},
        {
            "train": [
                (
                    "train-0",
                    "Question: How to be calm Context: breathe slowly. it helps.",
                    ("breathe.", "wait for e.g. a minute.", "done."),
                ),
                ("train-1", "Question: How to run Context: go out and run.", ("run.",)),
            ]
        },
    ),
    "cnn_dailymail": (
        {"all_val.txt": "http://one\nhttp://gone\n", "all_train.txt": "http://two\n"}
        | {story("http://one"): STORY, story("http://two").replace("cnn", "dailymail", 1): STORY},
        {
            "dev": [
                (
                    story("http://one").rpartition("/")[2].removesuffix(".story"),
                    "summarize: By Ann. It rained.",
                    ("Rain fell.", "All got wet ."),
                )
            ]
        },
    ),
    "pubmed": (
        {"pubmed-dataset/train.txt": in_lines(PAPER, PAPER | {"article_id": "p2"})},
        {
            "train": [
                ("train-0", "summarize: we saw mice .", ("mice ran .", "cats sat .")),
                ("train-1", "summarize: we saw mice .", ("mice ran .", "cats sat .")),
            ]
        },
    ),
    "sumpubmed": (
        {f"line_text/text_{i}.txt": f"BACKGROUND\nmouse {i}  <cit> .\n" for i in range(60)}
        | {f"shorter_abstract/abst_{i}.txt": f"mice <dig> .\n\ncat {i} .\n" for i in range(60)},
        {},
    ),
    "wikihow": (
        {"wikihowAll.csv": "headline,title,text\n" + HEADLINES, "all_test.txt": "HowtoPaint1\n"},
        {
            "test": [
                (
                    "test-0",
                    "Question: How to Paint1 Context: Go to a shop that sells paper. Then paint, and paint more.",
                    ("Buy paper.", "Paint it"),
                )
            ]
        },
    ),
}


def lay(directory, files, zipped=False):
    """Writes files, plain or into a zip with a folder around them."""
    directory.mkdir(parents=True, exist_ok=True)
    if zipped:
        with zipfile.ZipFile(directory / "release.zip", "w") as archive:
            for name, text in files.items():
                archive.writestr(f"release/{name}", text)
        return directory
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory
