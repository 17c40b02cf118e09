"""CNN/DailyMail (Hermann et al. 2015): news articles and their highlights, in the form of TFDS's cnn_dailymail 3.4.0.

TFDS can download and prepare it, which needs TensorFlow; this module prepares it from the publisher's files without.
"""

import hashlib
from collections.abc import Mapping
from pathlib import PurePosixPath

from pipejax.config import GridConfig
from pipejax.data.manual import File, Manual
from pipejax.data.published import Published, Records
from pipejax.data.text import split

_ENDS = (".", "!", "?", "'", "`", '"', "\u2019", "\u201d", ")")  # the ends of a complete sentence


def _read(manual: Manual) -> Mapping[str, Records]:
    lists = manual.splits({"train": ["all_train.txt"], "validation": ["all_val.txt"], "test": ["all_test.txt"]})
    stories = manual.inside("stories")
    return {name: _records(urls, stories) for name, urls in lists.items()}


def _records(urls: File, stories: Mapping[str, File]) -> Records:
    names = {hashlib.sha1(line.strip().encode()).hexdigest() for _, line in urls.lines()}
    for name in sorted(names):
        if story := stories.get(f"{name}.story"):
            article, highlights = _parse(story)
            if article and highlights:
                publisher = "cnn" if "cnn" in PurePosixPath(str(story)).parts[-3:] else "dm"
                record = {"article": article, "highlights": highlights, "publisher": publisher, "id": name}
                yield str(story), story.name, record


def _parse(story: File) -> tuple[str, str]:
    """The article as one line, each line of it with a full stop or the like, and the highlights on one line each."""
    article: list[str] = []
    highlights: list[str] = []
    part = article
    for _, raw in story.lines():
        line = raw.strip()
        if line.startswith("@highlight"):
            part = highlights
        elif line:
            part.append(line if line.endswith(_ENDS) or "@highlight" in line else f"{line}.")
    return " ".join(article), "\n".join(highlights)


TASK = Published(
    name="cnn_dailymail",
    directory="cnn_dailymail/3.4.0",
    files="cnn/stories/*.story, dailymail/stories/*.story (https://cs.nyu.edu/~kcho/DMQA) and all_train.txt, "
    "all_val.txt, all_test.txt (https://github.com/abisee/cnn-dailymail)",
    read=_read,
    splits={"train": "train", "dev": "validation", "test": "test"},
    source=lambda record: f"summarize: {record['article']}",
    targets=lambda record: split(record["highlights"], "\n"),
    grid=GridConfig(delay=1, time_max=96, sub_max=20),
    max_target=512,
    max_length=256,
)
