"""Finds texts of examples that change when they are encoded and decoded, or read from a sequential answer."""

from collections.abc import Iterable, Mapping

from pipejax.data.encoding import place_of_example
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer
from pipejax.methods import joined_change, shown

SOURCES, TARGETS, JOINED = "sources", "targets", "joined"
CHANGED: Mapping[str, tuple[str, str]] = {
    TARGETS: ("targets that the tokenizer does not give back", "so no answer can equal them"),
    SOURCES: ("sources that the tokenizer does not give back", "so the model reads other text"),
    JOINED: ("rows that contain data.separator", "so they are split when an answer is read"),
}


def describe_changes(
    examples: Iterable[Example], tokenizer: Tokenizer, separator: str, *, kinds: Iterable[str] = CHANGED, of: int = 0
) -> list[str]:
    """Returns a line for each kind of text that changes: the number of such examples, and the first of them.

    Args:
      examples: the examples to check.
      tokenizer: the model's tokenizer.
      separator: `data.separator`, if the method joins rows with it, else "".
      kinds: keys of CHANGED.
      of: the total number of examples, if only some are checked.
    """
    looked, counts, first = 0, dict.fromkeys(kinds, 0), dict[str, str]()
    for example in examples:
        looked += 1
        for kind in counts:
            if kind == JOINED:
                change = joined_change(example.targets, tokenizer, separator) if separator else None
            elif kind == SOURCES:
                change = tokenizer.change(example.source)
            else:
                change = next(filter(None, map(tokenizer.change, example.targets)), None)
            if change:
                counts[kind] += 1
                first.setdefault(kind, f"{shown(change)} ({place_of_example(example)})")
    part = f" that were looked at, of {of}," if looked < of else ""
    return [
        f"{count} of {looked} examples{part} have {', '.join(CHANGED[kind])}: {first[kind]}"
        for kind, count in counts.items()
        if count
    ]
