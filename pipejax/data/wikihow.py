"""wikiHow (Koupaee and Wang 2018): articles and the first lines of their steps.

The form is that of TFDS's wikihow/all 1.2.0. This module prepares it from the publisher's CSV file and lists of titles,
without TensorFlow and network.
"""

import re
from collections.abc import Mapping

from pipejax.config import GridConfig
from pipejax.data.lines import value_of
from pipejax.data.manual import File, Manual
from pipejax.data.published import Published, Records
from pipejax.data.tables import Dialect, Table, lines_of
from pipejax.data.text import split

_COLUMNS = ("headline", "title", "text")
_MOST = 0.75  # a headline of at least this part of the text's length is no summary


def _read(manual: Manual) -> Mapping[str, Records]:
    lists = manual.splits({"train": ["all_train.txt"], "validation": ["all_val.txt"], "test": ["all_test.txt"]})
    table = manual.need("wikihowAll.csv")
    return {name: _records(table, titles) for name, titles in lists.items()}


def _records(table: File, titles: File) -> Records:
    """Yields the rows of the CSV file whose titles are in a list, filtered and cleaned as TFDS does."""
    wanted = {line.strip() for _, line in titles.lines()}
    with table.open() as file:
        rows = Table(lines_of(file, str(table)), str(table), Dialect(",", "quote"), tell=False).records()
        for number, (place, row) in enumerate(rows):
            headline, title, text = (str(value_of(row, column, place)).strip() for column in _COLUMNS)
            if headline and len(headline) < _MOST * len(text) and title.replace(" ", "") in wanted:
                text = re.sub(r"\.+\n+,", ".\n", text)  # the file has a comma after the end of a step
                yield place, str(number), {"text": text, "headline": headline.replace(".,", "."), "title": title}


TASK = Published(
    name="wikihow",
    directory="wikihow/all/1.2.0",
    files="wikihowAll.csv, all_train.txt, all_val.txt and all_test.txt of WikiHow "
    "(https://github.com/mahnazkoupaee/WikiHow-Dataset)",
    read=_read,
    splits={"train": "train", "dev": "validation", "test": "test"},
    source=lambda record: f"Question: {record['title']} Context: {record['text']}",
    targets=lambda record: [row.removesuffix(",") for row in split(record["headline"], "\n")],
    grid=GridConfig(delay=1, time_max=128, sub_max=40),
    max_target=1024,
    max_length=768,
)
