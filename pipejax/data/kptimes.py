"""KPTimes (Gallina et al. 2019): keyphrases that editors gave to news articles.

Variants of one keyphrase make one row, with commas between them. The publisher's files may have either of two layouts:
the release's JSON lines, or JSON arrays of objects whose "source" is `title <eos> text` and whose "target" has
keyphrases separated by ";".
"""

import dataclasses
import itertools
from collections.abc import Mapping

from pipejax.data import kp20k
from pipejax.data.lines import read_array, text_of
from pipejax.data.manual import File, Manual
from pipejax.data.published import Record, Records
from pipejax.system.errors import UserError


def _read(manual: Manual) -> Mapping[str, Records]:
    halves = [file for name in ("NYTimes", "JPTimes") if (file := manual.find(f"test_{name}.jsonl"))]
    names = {"train": ["train.jsonl", "train.json"], "dev": ["valid.jsonl", "dev.jsonl", "dev.json"]}
    if len(halves) < 2:  # without both halves of the official test set
        names["test"] = ["test.jsonl", "test.json"]
    splits = {name: _records(name, file) for name, file in manual.splits(names).items()}
    if len(halves) == 2:
        splits["test"] = itertools.chain.from_iterable(_records("test", file) for file in halves)
    return splits


def _records(name: str, file: File) -> Records:
    if file.name.endswith(".json"):
        for number, (place, value) in enumerate(read_array(file.read(), str(file))):
            title, mark, text = text_of(value, "source", place).partition("<eos>")
            if not mark:
                raise UserError(f'{place}: "source": found no <eos>; expected a title, <eos> and a text')
            key = f"{name}-{number}"
            yield place, key, _record(key, title, text, kp20k.phrases_of(value, place, "target"))
        return
    for place, value in file.objects():
        key, title, text = (text_of(value, k, place) for k in ("id", "title", "abstract"))
        yield place, key, _record(key, title, text, kp20k.phrases_of(value, place))


def _record(key: str, title: str, text: str, phrases: list[str]) -> Record:
    return {"id": key, "title": title.strip(), "abstract": text.strip(), "keyphrases": phrases}


TASK = dataclasses.replace(
    kp20k.TASK,
    name="kptimes",
    directory="kptimes/1.0.0",
    files="train.jsonl, valid.jsonl, and test.jsonl or test_NYTimes.jsonl and test_JPTimes.jsonl of KPTimes "
    "(https://github.com/ygorg/KPTimes), unpacked or in their zip",
    read=_read,
    placeholders=(),
)
