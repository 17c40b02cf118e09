"""KP20k (Meng et al. 2017): keyphrases of computer science abstracts.

The publisher's files may have either of two layouts: the release's JSON lines, or the text files of later work, which
are lower-cased and have <digit> for every number. In those a source line is `title <eos> abstract`, and a target line
has keyphrases separated by ";".
"""

from collections.abc import Mapping
from itertools import zip_longest

from pipejax.config import GridConfig
from pipejax.data.lines import Object, check_text, kind, text_of, value_of
from pipejax.data.manual import File, Manual
from pipejax.data.published import Published, Record, Records
from pipejax.data.text import keyphrases, split
from pipejax.system.errors import UserError

_PRESENT_END = "<peos>"  # separates present from absent phrases in target lines


def _read(manual: Manual) -> Mapping[str, Records]:
    pairs = {
        name: (source, manual.need(f"{prefix}_trg.txt"))
        for name, prefix in (("train", "train"), ("dev", "valid"), ("test", "test"))
        if (source := manual.find(f"{prefix}_src.txt"))
    }
    if pairs:
        return {name: _from_pairs(name, *files) for name, files in pairs.items()}
    names = {"train": ["kp20k_training.json"], "dev": ["kp20k_validation.json"], "test": ["kp20k_testing.json"]}
    return {name: _from_objects(name, file) for name, file in manual.splits(names).items()}


def _from_pairs(name: str, source_file: File, target_file: File) -> Records:
    for number, (above, below) in enumerate(zip_longest(source_file.lines(), target_file.lines())):
        if above is None or below is None:
            there, lacks = (below, source_file) if above is None else (above, target_file)
            raise UserError(f"{there[0]}: found no such line in {lacks}; expected as many lines in both files")
        (place, source), (_, target) = above, below
        if not (source.strip() or target.strip()):
            continue  # the train split has a few blank lines
        title, mark, abstract = source.partition("<eos>")
        if not mark:
            raise UserError(f"{place}: found no <eos>; expected a title, <eos> and an abstract")
        phrases = [phrase for phrase in split(target, ";") if phrase != _PRESENT_END]
        key = f"{name}-{number}"
        yield place, key, {"id": key, "title": title.strip(), "abstract": abstract.strip(), "keyphrases": phrases}


def _from_objects(name: str, file: File) -> Records:
    for number, (place, value) in enumerate(file.objects()):
        record: Record = {"id": str(value.get("id") or f"{name}-{number}")}
        record |= {key: text_of(value, key, place).strip() for key in ("title", "abstract")}
        record["keyphrases"] = phrases_of(value, place)
        yield place, record["id"], record


def phrases_of(value: Object, place: str, key: str = "keyword") -> list[str]:
    """The keyphrases: text with ";" between them, or a list of texts or of lists of variants, joined by ","."""
    found = value_of(value, key, place)
    if isinstance(found, str):
        return split(found, ";")
    if not isinstance(found, list):
        raise UserError(f'{place}: "{key}": found {kind(found)}; expected text or a list')
    every = [item if isinstance(item, list) else [item] for item in found]
    return [",".join(check_text(v, f"{key}[{i}]", place).strip() for v in item) for i, item in enumerate(every)]


def source(record: Record) -> str:
    return f"Title: {record['title']} Context: {record['abstract']}"


def targets(record: Record) -> list[str]:
    """Present keyphrases in order of appearance, then the absent ones."""
    return keyphrases(f"{record['title']} {record['abstract']}", record["keyphrases"])


TASK = Published(
    name="kp20k",
    directory="kp20k/1.0.0",
    files=(
        "train_src.txt, train_trg.txt, valid_src.txt, ..., or kp20k_training.json, kp20k_validation.json and "
        "kp20k_testing.json (https://github.com/memray/seq2seq-keyphrase), unpacked or in their zip"
    ),
    read=_read,
    fields={"id": str, "title": str, "abstract": str, "keyphrases": list},
    source=source,
    targets=targets,
    metric="keyphrases_kp20k",
    separator="; ",
    grid=GridConfig(delay=1, time_max=50, sub_max=20),
    max_target=256,
    max_length=128,
    placeholders=(("<digit>", "#"),),
)
