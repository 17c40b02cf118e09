"""PubMed (Cohan et al. 2018): articles and their abstracts, in the form of TFDS's scientific_papers/pubmed 1.1.1.

TFDS can download and prepare it, which needs TensorFlow; this module prepares it from the publisher's files without.
The paper's PubMed has the sizes of this data set, although the paper cites another one (see `sumpubmed`).
"""

from collections.abc import Mapping

from pipejax.config import GridConfig
from pipejax.data.lines import Object, kind, text_of, value_of
from pipejax.data.manual import File, Manual
from pipejax.data.published import Published, Records
from pipejax.data.text import split
from pipejax.system.errors import UserError


def _read(manual: Manual) -> Mapping[str, Records]:
    names = {"train": ["train.txt"], "validation": ["val.txt"], "test": ["test.txt"]}
    return {name: _records(file) for name, file in manual.splits(names).items()}


def _records(file: File) -> Records:
    for place, value in file.objects():
        record = {
            "article": _join(value, "article_text", place),
            "abstract": _join(value, "abstract_text", place).replace("<S>", "").replace("</S>", ""),
            "section_names": _join(value, "section_names", place),
        }
        yield place, text_of(value, "article_id", place), record


def _join(value: Object, key: str, place: str) -> str:
    texts = value_of(value, key, place)
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise UserError(f'{place}: "{key}": found {kind(texts)}; expected a list of texts')
    return "\n".join(texts)


TASK = Published(
    name="pubmed",
    directory="scientific_papers/pubmed/1.1.1",
    files="train.txt, val.txt and test.txt of pubmed-dataset (https://github.com/armancohan/long-summarization), "
    "unpacked or in their zip",
    read=_read,
    splits={"train": "train", "dev": "validation", "test": "test"},
    source=lambda record: f"summarize: {record['article']}",
    targets=lambda record: split(record["abstract"], "\n"),
    grid=GridConfig(delay=1, time_max=256, sub_max=24),
    max_target=1024,
    max_length=1024,
)
