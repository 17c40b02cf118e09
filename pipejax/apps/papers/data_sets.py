"""The data sets of the papers: how the publisher's files become records, and how records become examples.

MultiSpanQA (Li et al. 2022; the paper's MSQA), KP20k (Meng et al. 2017), KPTimes (Gallina et al. 2019), WikiHowQA (Deng
et al. 2020), CNN/DailyMail (Hermann et al. 2015), PubMed (Cohan et al. 2018), SumPubMed (Gupta et al. 2021) and wikiHow
(Koupaee and Wang 2018). CNN/DailyMail, PubMed and wikiHow have the same records as TFDS's cnn_dailymail 3.4.0,
scientific_papers/pubmed 1.1.1 and wikihow/all 1.2.0. TFDS needs TensorFlow to prepare these; this module does not.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from pipejax.apps.papers.manual import File, Manual
from pipejax.apps.papers.published import Published, Record, Records
from pipejax.apps.papers.texts import read_array
from pipejax.config import GridConfig
from pipejax.data.lines import Object, check_text, kind, text_of, texts_of, value_of
from pipejax.data.tables import Dialect, TextTable, count_columns, lines_of
from pipejax.data.text import keyphrases, sentences, split_rows
from pipejax.system.errors import UserError

VALIDATION = {"train": "train", "dev": "validation", "test": "test"}  # TFDS's names of the splits
LISTS = {"train": ["all_train.txt"], "validation": ["all_val.txt"], "test": ["all_test.txt"]}

# MultiSpanQA: questions whose answer is several spans of a document. The official test set has no labels. So the test
# split is the official valid.json (653 examples), and the dev split is an eighth of train.json (653 of 5,230): the
# examples whose ids have the smallest BLAKE2b digests. Files in the other layout, arrays of objects with "answers",
# already have a dev split and keep their splits.
DEV_SHARE = 8


def _msqa(manual: Manual) -> Mapping[str, Records]:
    """Returns the records by split, from files of one of the two layouts."""
    names = {"train": ["train.json"], "dev": ["dev.json", "valid.json"], "test": ["test.json"]}
    files = manual.splits(names)
    official = {split for split, file in files.items() if file.read().lstrip()[:1] == b"{"}
    if not official:
        return {split: _questions(file) for split, file in files.items()}
    if official != set(files):
        mixed = " and ".join(str(files[split]) for split in names if split in files)
        raise UserError(mixed, found="files of the official layout and of another layout", expected="one layout")
    splits: dict[str, Records] = {}
    if "train" in files:
        ids = [record[1] for record in _questions(files["train"])]
        ids.sort(key=lambda name: hashlib.blake2b(name.encode()).digest())
        dev = set(ids[: len(ids) // DEV_SHARE])
        splits["train"] = (record for record in _questions(files["train"]) if record[1] not in dev)
        splits["dev"] = (record for record in _questions(files["train"]) if record[1] in dev)
    if "dev" in files:
        splits["test"] = _questions(files["dev"])
    return splits or manual.missing("labelled train.json or valid.json")


def _questions(file: File) -> Records:
    for place, value in read_array(file.read(), str(file)):
        name = text_of(value, "id", place)
        words = isinstance(value.get("context"), list)
        question, context, answers = _from_labels(value, place) if words else _from_offsets(value, place)
        yield place, name, {"id": name, "question": question, "context": context, "answers": answers}


def _from_labels(value: Object, place: str) -> tuple[str, str, list[str]]:
    """Returns question, context and answers of the official layout: lists of words, with a label B, I or O per word."""
    question, context = texts_of(value, "question", place), texts_of(value, "context", place)
    labels = texts_of(value, "label", place)
    if len(labels) != len(context):
        raise UserError(
            f'{place}: "label"', found=f"{len(labels)} labels for {len(context)} words", expected="one for each"
        )
    answers: list[list[str]] = []
    before = "O"
    for word, label in zip(context, labels, strict=True):
        if label not in ("B", "I", "O") or (label == "I" and before == "O"):
            raise UserError(
                f'{place}: "label"', found=f"{label!r} after {before!r}", expected="B, O, or I within a span"
            )
        if label == "B":
            answers.append([])
        if label != "O":
            answers[-1].append(word)
        before = label
    return " ".join(question), " ".join(context), [" ".join(words) for words in answers]


def _from_offsets(value: Object, place: str) -> tuple[str, str, list[str]]:
    """Returns question, context and answers of the other layout: texts, and each answer as [text, [start, end]]."""
    question, context = text_of(value, "question", place), text_of(value, "context", place)
    pairs = value_of(value, "answers", place)
    if not (isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)):
        raise UserError(f'{place}: "answers"', found=f"{kind(pairs)}", expected="a list of [text, [start, end]]")
    answers = [check_text(answer, f"answers[{i}]", place) for i, (answer, _) in enumerate(pairs)]
    return question, context, answers


MSQA = Published(
    name="msqa",
    directory="msqa/1.0.0",
    files="train.json and valid.json of MultiSpanQA (https://multi-span.github.io), unpacked or in their zip",
    read=_msqa,
    fields={"id": str, "question": str, "context": str, "answers": list},
    source=lambda record: f"Question: {record['question']} Context: {record['context']}",
    targets=lambda record: record["answers"],
    metric="spans",
    separator="; ",  # one piece of T5's vocabulary that no answer contains; one answer contains " # "
    grid=GridConfig(delay=1, time_max=50, sub_max=20),
    max_target=256,
    max_length=128,
)

# KP20k: keyphrases of computer science abstracts. The files may have either of two layouts: the release's JSON lines,
# or the text files of later work, which are in lower case and have <digit> for every number. In these, a source line is
# `title <eos> abstract`, and a target line has keyphrases separated by ";".
PRESENT_END = "<peos>"  # separates present from absent phrases in target lines


def _kp20k(manual: Manual) -> Mapping[str, Records]:
    """Returns the records by split, from files of one of the two layouts."""
    pairs = {
        name: (source, manual.need(f"{prefix}_trg.txt"))
        for name, prefix in (("train", "train"), ("dev", "valid"), ("test", "test"))
        if (source := manual.find(f"{prefix}_src.txt"))
    }
    if pairs:
        return {name: _abstracts_in_pairs(name, *files) for name, files in pairs.items()}
    names = {"train": ["kp20k_training.json"], "dev": ["kp20k_validation.json"], "test": ["kp20k_testing.json"]}
    return {name: _abstracts(name, file) for name, file in manual.splits(names).items()}


def _abstracts_in_pairs(name: str, source_file: File, target_file: File) -> Records:
    """Yields the records of a pair of text files: sources, and targets line by line."""
    for number, (above, below) in enumerate(itertools.zip_longest(source_file.lines(), target_file.lines())):
        if above is None or below is None:
            there, lacks = (below, source_file) if above is None else (above, target_file)
            raise UserError(
                there[0],
                found=f"no line with this number in {lacks}",
                expected="the same number of lines in both files",
            )
        (place, source), (_, target) = above, below
        if not (source.strip() or target.strip()):
            continue  # the train split has a few blank lines
        title, abstract = _parted(source, place, "an abstract")
        phrases = [phrase for phrase in split_rows(target, ";") if phrase != PRESENT_END]
        yield place, f"{name}-{number}", _titled(f"{name}-{number}", title, abstract, phrases)


def _parted(text: str, place: str, expected: str) -> list[str]:
    if "<eos>" not in text:
        raise UserError(place, found="no <eos>", expected=f"a title, <eos> and {expected}")
    return text.split("<eos>", 1)


def _abstracts(name: str, file: File, *, need_id: bool = False) -> Records:
    for number, (place, value) in enumerate(file.objects()):
        key = text_of(value, "id", place) if need_id else str(value.get("id") or f"{name}-{number}")
        title, abstract = (text_of(value, key, place) for key in ("title", "abstract"))
        yield place, key, _titled(key, title, abstract, _phrases(value, place))


def _phrases(value: Object, place: str, key: str = "keyword") -> list[str]:
    """Returns the keyphrases of a record.

    The value is a text with ";" between keyphrases, or a list of texts, or of lists of variants, which are joined by
    ",".
    """
    found = value_of(value, key, place)
    if isinstance(found, str):
        return split_rows(found, ";")
    if not isinstance(found, list):
        raise UserError(f'{place}: "{key}"', found=f"{kind(found)}", expected="text or a list")
    every = [item if isinstance(item, list) else [item] for item in found]
    return [",".join(check_text(v, f"{key}[{i}]", place).strip() for v in item) for i, item in enumerate(every)]


def _titled(key: str, title: str, text: str, phrases: list[str]) -> Record:
    return {"id": key, "title": title.strip(), "abstract": text.strip(), "keyphrases": phrases}


KP20K = Published(
    name="kp20k",
    directory="kp20k/1.0.0",
    files=(
        "train_src.txt, train_trg.txt, valid_src.txt, ..., or kp20k_training.json, kp20k_validation.json and "
        "kp20k_testing.json (https://github.com/memray/seq2seq-keyphrase), unpacked or in their zip"
    ),
    read=_kp20k,
    fields={"id": str, "title": str, "abstract": str, "keyphrases": list},
    source=lambda record: f"Title: {record['title']} Context: {record['abstract']}",
    # Present keyphrases come first, in order of appearance, then absent ones.
    targets=lambda record: keyphrases(f"{record['title']} {record['abstract']}", record["keyphrases"]),
    metric="keyphrases_kp20k",
    separator="; ",
    grid=GridConfig(delay=1, time_max=50, sub_max=20),
    max_target=256,
    max_length=128,
    placeholders=(("<digit>", "#"),),
)

# KPTimes: keyphrases that editors gave to news articles. Variants of one keyphrase make one row, with commas between
# them. The files may have either of two layouts: the release's JSON lines, or JSON arrays of objects whose "source" is
# `title <eos> text` and whose "target" has keyphrases separated by ";".


def _kptimes(manual: Manual) -> Mapping[str, Records]:
    halves = [file for name in ("NYTimes", "JPTimes") if (file := manual.find(f"test_{name}.jsonl"))]
    names = {"train": ["train.jsonl", "train.json"], "dev": ["valid.jsonl", "dev.jsonl", "dev.json"]}
    if len(halves) < 2:  # without both halves of the official test set
        names["test"] = ["test.jsonl", "test.json"]
    splits = {name: _articles(name, file) for name, file in manual.splits(names).items()}
    if len(halves) == 2:
        splits["test"] = itertools.chain.from_iterable(_articles("test", file) for file in halves)
    return splits


def _articles(name: str, file: File) -> Records:
    if not file.name.endswith(".json"):
        yield from _abstracts(name, file, need_id=True)
        return
    for number, (place, value) in enumerate(read_array(file.read(), str(file))):
        title, text = _parted(text_of(value, "source", place), f'{place}: "source"', "a text")
        yield place, f"{name}-{number}", _titled(f"{name}-{number}", title, text, _phrases(value, place, "target"))


KPTIMES = dataclasses.replace(
    KP20K,
    name="kptimes",
    directory="kptimes/1.0.0",
    files="train.jsonl, valid.jsonl, and test.jsonl or test_NYTimes.jsonl and test_JPTimes.jsonl of KPTimes "
    "(https://github.com/ygorg/KPTimes), unpacked or in their zip",
    read=_kptimes,
    placeholders=(),
)

# WikiHowQA: how-to questions with a long answer; the target is the summary of the answer. Each line of summary.txt is
# an answer (id, answer, summary). Each line of train.txt, valid.txt and test.txt pairs a question with an answer
# (question, id, label); the label is 1 if the answer belongs to the question. Tabs separate the columns.


def _wikihowqa(manual: Manual) -> Mapping[str, Records]:
    files = manual.splits({"train": ["train.txt"], "dev": ["valid.txt"], "test": ["test.txt"]})
    summaries = manual.need("summary.txt")
    return {name: _how_to(name, file, summaries) for name, file in files.items()}


def _how_to(name: str, file: File, summaries: File) -> Records:
    """Yields a record for each pair of a question and one of its answers."""
    pairs: list[tuple[str, str, str]] = []
    for place, line in file.lines():
        columns = line.split("\t")
        if len(columns) < 3 or columns[2].strip() not in ("0", "1"):
            raise UserError(place, found=count_columns(columns), expected="a question, an id, and a label 0 or 1")
        if columns[2].strip() == "1":
            pairs.append((place, check_text(columns[0], "question", place), columns[1].strip()))
    wanted = {answer for _, _, answer in pairs}
    texts: dict[str, tuple[str, str]] = {}
    for place, line in summaries.lines():
        columns = line.split("\t")
        if len(columns) != 3:
            raise UserError(place, found=count_columns(columns), expected="an id, an answer and its summary")
        if columns[0].strip() in wanted:
            texts[columns[0].strip()] = columns[1], columns[2]
    for number, (place, question, answer) in enumerate(pairs):
        if answer not in texts:
            raise UserError(place, found=f"no answer {answer!r} in {summaries}", expected="one")
        text, summary = texts[answer]
        key = f"{name}-{number}"
        yield place, key, {"id": key, "question": question, "answer": text, "summary": summary}


WIKIHOWQA = Published(
    name="wikihowqa",
    directory="wikihowqa/1.0.0",
    files="train.txt, valid.txt, test.txt and summary.txt of WikiHowQA (https://github.com/dengyang17/wikihowQA), "
    "unpacked or in their zip",
    read=_wikihowqa,
    fields={"id": str, "question": str, "answer": str, "summary": str},
    source=lambda record: f"Question: {record['question']} Context: {record['answer']}",
    targets=lambda record: sentences(record["summary"]),
    grid=GridConfig(delay=1, time_max=128, sub_max=40),
    max_target=1024,
    max_length=768,
)

# CNN/DailyMail: news articles and their highlights.
ENDS = (".", "!", "?", "'", "`", '"', "\u2019", "\u201d", ")")  # the ends of a complete sentence


def _cnn_dailymail(manual: Manual) -> Mapping[str, Records]:
    lists, stories = manual.splits(LISTS), manual.inside("stories")
    return {name: _stories(urls, stories) for name, urls in lists.items()}


def _stories(urls: File, stories: Mapping[str, File]) -> Records:
    names = {hashlib.sha1(line.strip().encode()).hexdigest() for _, line in urls.lines()}
    for name in sorted(names):
        if story := stories.get(f"{name}.story"):
            article, highlights = _parse(story)
            if article and highlights:
                publisher = "cnn" if "cnn" in PurePosixPath(str(story)).parts[-3:] else "dm"
                record = {"article": article, "highlights": highlights, "publisher": publisher, "id": name}
                yield str(story), story.name, record


def _parse(story: File) -> tuple[str, str]:
    """Returns the article and the highlights of a story.

    The article is one line, and each of its former lines ends with a full stop or similar. The highlights are one per
    line.
    """
    article: list[str] = []
    highlights: list[str] = []
    part = article
    for _, raw in story.lines():
        line = raw.strip()
        if line.startswith("@highlight"):
            part = highlights
        elif line:
            part.append(line if line.endswith(ENDS) or "@highlight" in line else f"{line}.")
    return " ".join(article), "\n".join(highlights)


CNN_DAILYMAIL = Published(
    name="cnn_dailymail",
    directory="cnn_dailymail/3.4.0",
    files="cnn/stories/*.story, dailymail/stories/*.story (https://cs.nyu.edu/~kcho/DMQA) and all_train.txt, "
    "all_val.txt, all_test.txt (https://github.com/abisee/cnn-dailymail)",
    read=_cnn_dailymail,
    splits=VALIDATION,
    source=lambda record: f"summarize: {record['article']}",
    targets=lambda record: split_rows(record["highlights"], "\n"),
    grid=GridConfig(delay=1, time_max=96, sub_max=20),
    max_target=512,
    max_length=256,
)

# PubMed: articles and their abstracts. The paper's PubMed has the sizes of this data set, although the paper cites
# another one, which is SumPubMed.


def _pubmed(manual: Manual) -> Mapping[str, Records]:
    names = {"train": ["train.txt"], "validation": ["val.txt"], "test": ["test.txt"]}
    return {name: _papers(file) for name, file in manual.splits(names).items()}


def _papers(file: File) -> Records:
    for place, value in file.objects():
        record = {
            "article": _joined_texts(value, "article_text", place),
            "abstract": _joined_texts(value, "abstract_text", place).replace("<S>", "").replace("</S>", ""),
            "section_names": _joined_texts(value, "section_names", place),
        }
        yield place, text_of(value, "article_id", place), record


def _joined_texts(value: Object, key: str, place: str) -> str:
    return "\n".join(texts_of(value, key, place, blank=True))


PUBMED = Published(
    name="pubmed",
    directory="scientific_papers/pubmed/1.1.1",
    files="train.txt, val.txt and test.txt of pubmed-dataset (https://github.com/armancohan/long-summarization), "
    "unpacked or in their zip",
    read=_pubmed,
    splits=VALIDATION,
    source=lambda record: f"summarize: {record['article']}",
    targets=lambda record: split_rows(record["abstract"], "\n"),
    grid=GridConfig(delay=1, time_max=256, sub_max=24),
    max_target=1024,
    max_length=1024,
)

# SumPubMed: biomedical articles and their summaries. The paper cites it but reports on PubMed. There is no official
# split, so the BLAKE2b digest of an article's number decides it. Dev and test get a twentieth each, train the rest.
SHARES = 20


def _sumpubmed(manual: Manual) -> Mapping[str, Records]:
    """Returns the records by split; the digest of an article's number decides its split."""
    articles, summaries = manual.inside("line_text"), manual.inside("shorter_abstract")
    numbers: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for name in sorted(summaries):
        number = name.removeprefix("abst_").removesuffix(".txt")
        if f"text_{number}.txt" not in articles:
            raise UserError(summaries[name], found=f"no line_text/text_{number}.txt", expected="its article")
        share = int.from_bytes(hashlib.blake2b(number.encode(), digest_size=8).digest()) % SHARES
        numbers[{0: "dev", 1: "test"}.get(share, "train")].append(number)
    return {name: _summarised(part, articles, summaries) for name, part in numbers.items()}


def _summarised(numbers: list[str], articles: Mapping[str, File], summaries: Mapping[str, File]) -> Records:
    for number in numbers:
        files = articles[f"text_{number}.txt"], summaries[f"abst_{number}.txt"]
        texts = ["\n".join(line for _, line in file.lines()) for file in files]
        yield str(files[1]), number, {"id": number, "article": texts[0], "summary": texts[1]}


SUMPUBMED = Published(
    name="sumpubmed",
    directory="sumpubmed/1.0.0",
    files="the folders line_text and shorter_abstract of SumPubMed (https://github.com/vgupta123/sumpubmed), "
    "or the repository's zip",
    read=_sumpubmed,
    fields={"id": str, "article": str, "summary": str},
    source=lambda record: f"summarize: {record['article']}",
    targets=lambda record: split_rows(record["summary"], "\n"),
    grid=GridConfig(delay=1, time_max=256, sub_max=24),
    max_target=1024,
    max_length=1024,
    placeholders=(("<dig>", "#"), ("<cit>", "[cit]")),
)

# wikiHow: articles and the first lines of their steps, from the publisher's CSV file and lists of titles.
COLUMNS = ("headline", "title", "text")
MOST = 0.75  # a headline longer than this share of the text's length is not a summary


def _wikihow(manual: Manual) -> Mapping[str, Records]:
    lists, table = manual.splits(LISTS), manual.need("wikihowAll.csv")
    return {name: _steps(table, titles) for name, titles in lists.items()}


def _steps(table: File, titles: File) -> Records:
    """Yields the rows of the CSV file whose titles are in a list, filtered and cleaned like TFDS's."""
    wanted = {line.strip() for _, line in titles.lines()}
    with table.open() as file:
        rows = TextTable(lines_of(file, str(table)), str(table), Dialect(",", "quote"), tell=False).records()
        for number, (place, row) in enumerate(rows):
            headline, title, text = (str(value_of(row, column, place)).strip() for column in COLUMNS)
            if headline and len(headline) < MOST * len(text) and title.replace(" ", "") in wanted:
                text = re.sub(r"\.+\n+,", ".\n", text)  # the file has a comma after the end of a step
                yield place, str(number), {"text": text, "headline": headline.replace(".,", "."), "title": title}


WIKIHOW = Published(
    name="wikihow",
    directory="wikihow/all/1.2.0",
    files="wikihowAll.csv, all_train.txt, all_val.txt and all_test.txt of WikiHow "
    "(https://github.com/mahnazkoupaee/WikiHow-Dataset)",
    read=_wikihow,
    splits=VALIDATION,
    source=lambda record: f"Question: {record['title']} Context: {record['text']}",
    targets=lambda record: [row.removesuffix(",") for row in split_rows(record["headline"], "\n")],
    grid=GridConfig(delay=1, time_max=128, sub_max=40),
    max_target=1024,
    max_length=768,
)

# In the order of the paper's Table 1, which does not have SumPubMed and wikiHow.
PUBLISHED = {task.name: task for task in (MSQA, KP20K, KPTIMES, WIKIHOWQA, CNN_DAILYMAIL, PUBMED, SUMPUBMED, WIKIHOW)}
