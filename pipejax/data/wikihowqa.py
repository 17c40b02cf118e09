"""WikiHowQA (Deng et al. 2020): how-to questions with a long answer; the target is the summary of the answer.

Each line of summary.txt is an answer (id, answer, summary). Each line of train.txt, valid.txt and test.txt pairs a
question with an answer (question, id, label); the label is 1 if the answer belongs to the question. Tabs separate the
columns.
"""

from collections.abc import Mapping

from pipejax.config import GridConfig
from pipejax.data.lines import check_text
from pipejax.data.manual import File, Manual
from pipejax.data.published import Published, Records
from pipejax.data.text import sentences
from pipejax.system.errors import UserError


def _read(manual: Manual) -> Mapping[str, Records]:
    files = manual.splits({"train": ["train.txt"], "dev": ["valid.txt"], "test": ["test.txt"]})
    summaries = manual.need("summary.txt")
    return {name: _records(name, file, summaries) for name, file in files.items()}


def _records(name: str, file: File, summaries: File) -> Records:
    """Yields the questions of a split that are paired with their own answer, with its summary."""
    pairs: list[tuple[str, str, str]] = []
    for place, line in file.lines():
        columns = line.split("\t")
        if len(columns) < 3 or columns[2].strip() not in ("0", "1"):
            raise UserError(f"{place}: found {len(columns)} columns; expected a question, an id, and a label 0 or 1")
        if columns[2].strip() == "1":
            pairs.append((place, check_text(columns[0], "question", place), columns[1].strip()))
    wanted = {answer for _, _, answer in pairs}
    texts: dict[str, tuple[str, str]] = {}
    for place, line in summaries.lines():
        columns = line.split("\t")
        if len(columns) != 3:
            raise UserError(f"{place}: found {len(columns)} columns; expected an id, an answer and its summary")
        if columns[0].strip() in wanted:
            texts[columns[0].strip()] = columns[1], columns[2]
    for number, (place, question, answer) in enumerate(pairs):
        if answer not in texts:
            raise UserError(f"{place}: found no answer {answer!r} in {summaries}; expected one")
        text, summary = texts[answer]
        key = f"{name}-{number}"
        yield place, key, {"id": key, "question": question, "answer": text, "summary": summary}


TASK = Published(
    name="wikihowqa",
    directory="wikihowqa/1.0.0",
    files="train.txt, valid.txt, test.txt and summary.txt of WikiHowQA (https://github.com/dengyang17/wikihowQA), "
    "unpacked or in their zip",
    read=_read,
    fields={"id": str, "question": str, "answer": str, "summary": str},
    source=lambda record: f"Question: {record['question']} Context: {record['answer']}",
    targets=lambda record: sentences(record["summary"]),
    grid=GridConfig(delay=1, time_max=128, sub_max=40),
    max_target=1024,
    max_length=768,
)
