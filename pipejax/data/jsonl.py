"""One's own data: a file a split, lines `{"id", "source", "targets": [row, ...]}`."""

from collections.abc import Sequence

from pipejax.config import DataConfig
from pipejax.data.core import Example
from pipejax.data.lines import check_text, id_of, kind, read_file, text_of
from pipejax.errors import UserError
from pipejax.tokenizer import Tokenizer


class JsonlTask:
    """Reads `data.train`, `data.dev` and `data.test`."""

    def __init__(self, config: DataConfig) -> None:
        """Files are opened only when a split is asked for."""
        self.paths = {"train": config.train, "dev": config.dev, "test": config.test}

    def examples(self, split: str) -> Sequence[Example]:
        """All examples of a split, checked line by line; none if the config names no file."""
        return read_examples(self.paths[split]) if self.paths[split] else []

    def tokenizer(self) -> Tokenizer | None:
        """It has none: `data.tokenizer` or the starting checkpoint brings one."""
        return None


def read_examples(path: str) -> list[Example]:
    """Raises a UserError naming file and line for anything that is not an example, a duplicate id or an empty file."""
    examples, seen = [], dict[str, str]()
    for place, value in read_file(path):
        name, source = str(id_of(value, place)), text_of(value, "source", place)
        if name in seen:
            raise UserError(f'{place}: "id": found {name!r} again; it was used in line {seen[name].rpartition(":")[2]}')
        seen[name] = place
        if "targets" not in value:
            raise UserError(f'{place}: found no "targets"; expected a list of texts')
        targets = value["targets"]
        if not isinstance(targets, list):
            raise UserError(f'{place}: "targets": found {kind(targets)}; expected a list of texts')
        rows = tuple(check_text(row, f"targets[{i}]", place) for i, row in enumerate(targets))
        examples.append(Example(name, source, rows))
    if not examples:
        raise UserError(f"{path}: found no lines; expected at least one example")
    return examples
