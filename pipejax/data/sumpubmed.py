"""SumPubMed (Gupta et al. 2021): biomedical articles and their summaries. The paper cites it but reports on `pubmed`.

There is no official split. The BLAKE2b digest of an article's number decides its split: dev and test get a twentieth
each, train the rest.
"""

import hashlib
from collections.abc import Mapping

from pipejax.config import GridConfig
from pipejax.data.manual import File, Manual
from pipejax.data.published import Published, Records
from pipejax.data.text import split
from pipejax.system.errors import UserError

_SHARES = 20


def _read(manual: Manual) -> Mapping[str, Records]:
    articles, summaries = manual.inside("line_text"), manual.inside("shorter_abstract")
    numbers: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for name in sorted(summaries):
        number = name.removeprefix("abst_").removesuffix(".txt")
        if f"text_{number}.txt" not in articles:
            raise UserError(f"{summaries[name]}: found no line_text/text_{number}.txt; expected its article")
        share = int.from_bytes(hashlib.blake2b(number.encode(), digest_size=8).digest()) % _SHARES
        numbers[{0: "dev", 1: "test"}.get(share, "train")].append(number)
    return {name: _records(part, articles, summaries) for name, part in numbers.items()}


def _records(numbers: list[str], articles: Mapping[str, File], summaries: Mapping[str, File]) -> Records:
    for number in numbers:
        files = articles[f"text_{number}.txt"], summaries[f"abst_{number}.txt"]
        texts = ["\n".join(line for _, line in file.lines()) for file in files]
        yield str(files[1]), number, {"id": number, "article": texts[0], "summary": texts[1]}


TASK = Published(
    name="sumpubmed",
    directory="sumpubmed/1.0.0",
    files="the folders line_text and shorter_abstract of SumPubMed (https://github.com/vgupta123/sumpubmed), "
    "or the repository's zip",
    read=_read,
    fields={"id": str, "article": str, "summary": str},
    source=lambda record: f"summarize: {record['article']}",
    targets=lambda record: split(record["summary"], "\n"),
    grid=GridConfig(delay=1, time_max=256, sub_max=24),
    max_target=1024,
    max_length=1024,
    placeholders=(("<dig>", "#"), ("<cit>", "[cit]")),
)
