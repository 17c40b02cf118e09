"""MultiSpanQA (Li et al. 2022): questions whose answer is several spans of a document. The paper's MSQA.

The official test set has no labels. So the test split is the official valid.json (653 examples), and the dev split is
an eighth of train.json (653 of 5,230): the examples whose ids have the smallest BLAKE2b digests. Files in the other
layout, arrays of objects with "answers", have a dev split of their own and keep their splits.
"""

import hashlib
from collections.abc import Mapping

from pipejax.config import GridConfig
from pipejax.data.lines import Object, check_text, kind, read_array, text_of, texts_of, value_of
from pipejax.data.manual import File, Manual
from pipejax.data.published import Published, Records
from pipejax.system.errors import UserError

_DEV_SHARE = 8


def _read(manual: Manual) -> Mapping[str, Records]:
    """The records by split; splits of the official layout are assigned as the module says."""
    names = {"train": ["train.json"], "dev": ["dev.json", "valid.json"], "test": ["test.json"]}
    files = manual.splits(names)
    official = {split for split, file in files.items() if file.read().lstrip()[:1] == b"{"}
    if not official:
        return {split: _records(file) for split, file in files.items()}
    if official != set(files):
        mixed = " and ".join(str(files[split]) for split in names if split in files)
        raise UserError(f"{mixed}: found the official layout and another; expected one of them")
    splits: dict[str, Records] = {}
    if "train" in files:
        ids = [record[1] for record in _records(files["train"])]
        ids.sort(key=lambda name: hashlib.blake2b(name.encode()).digest())
        dev = set(ids[: len(ids) // _DEV_SHARE])
        splits["train"] = (record for record in _records(files["train"]) if record[1] not in dev)
        splits["dev"] = (record for record in _records(files["train"]) if record[1] in dev)
    if "dev" in files:
        splits["test"] = _records(files["dev"])
    return splits or manual.missing("labelled train.json or valid.json")


def _records(file: File) -> Records:
    for place, value in read_array(file.read(), str(file)):
        name = text_of(value, "id", place)
        words = isinstance(value.get("context"), list)
        question, context, answers = _from_labels(value, place) if words else _from_offsets(value, place)
        yield place, name, {"id": name, "question": question, "context": context, "answers": answers}


def _from_labels(value: Object, place: str) -> tuple[str, str, list[str]]:
    """Question, context and answers of the official layout: lists of words, and a label B, I or O a context word."""
    question, context = texts_of(value, "question", place), texts_of(value, "context", place)
    labels = texts_of(value, "label", place)
    if len(labels) != len(context):
        raise UserError(f'{place}: "label": found {len(labels)} labels for {len(context)} words; expected one for each')
    answers: list[list[str]] = []
    before = "O"
    for word, label in zip(context, labels, strict=True):
        if label not in ("B", "I", "O") or (label == "I" and before == "O"):
            raise UserError(f'{place}: "label": found {label!r} after {before!r}; expected B, O, or I within a span')
        if label == "B":
            answers.append([])
        if label != "O":
            answers[-1].append(word)
        before = label
    return " ".join(question), " ".join(context), [" ".join(words) for words in answers]


def _from_offsets(value: Object, place: str) -> tuple[str, str, list[str]]:
    """Question, context and answers of the other layout: texts, and each answer as [text, [start, end]]."""
    question, context = text_of(value, "question", place), text_of(value, "context", place)
    pairs = value_of(value, "answers", place)
    if not (isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)):
        raise UserError(f'{place}: "answers": found {kind(pairs)}; expected a list of [text, [start, end]]')
    answers = [check_text(answer, f"answers[{i}]", place) for i, (answer, _) in enumerate(pairs)]
    return question, context, answers


TASK = Published(
    name="msqa",
    directory="msqa/1.0.0",
    files="train.json and valid.json of MultiSpanQA (https://multi-span.github.io), unpacked or in their zip",
    read=_read,
    fields={"id": str, "question": str, "context": str, "answers": list},
    source=lambda record: f"Question: {record['question']} Context: {record['context']}",
    targets=lambda record: record["answers"],
    metric="spans",
    separator="; ",  # one piece of T5's vocabulary that no answer contains; one answer contains " # "
    grid=GridConfig(delay=1, time_max=50, sub_max=20),
    max_target=256,
    max_length=128,
)
