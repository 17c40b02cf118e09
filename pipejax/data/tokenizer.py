"""Text <-> token ids, on top of transformers' tokenizers. No model, no task and no batch lives here."""

import fnmatch
import hashlib
import json
import os
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipejax.system.errors import UserError
from pipejax.system.files import look

# A directory holds a tokenizer if it holds one of these; ByT5's needs no vocabulary, only the last.
_FILES = ("tokenizer.json", "spiece.model", "tokenizer_config.json")
# What else may decide on ids, under the names that transformers' tokenizers give to their files.
_READ = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "config.json"),
    *("*.model", "*.spm", "*.tiktoken", "*.tokenizer", "*vocab*", "merges*", "*bpe*", "dict*.txt"),
    *("byte_maps.json", "emoji.json", "word_*.json"),
)
# Of every call that reads files: what lies in a directory is data, and is never run or asked about.
_DATA: dict[str, Any] = {"trust_remote_code": False}
_HUB_TIMEOUT = 10.0  # seconds to find out whether the hub answers and knows a name


class Tokenizer:
    """Encodes without adding special tokens and decodes without them; safe to share between threads."""

    size: int  # the largest id + 1

    def __init__(self, inner: Any) -> None:
        """Wraps a tokenizer of transformers; see `load` for the ordinary way in."""
        self._inner = inner
        self._backend = inner.backend_tokenizer if inner.is_fast else None
        if self._backend is not None:
            # Set once, here: transformers sets them at each call, which fails while another thread encodes.
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = inner.split_special_tokens
        self._lock = threading.Lock()
        self.size = max(inner.get_vocab().values()) + 1

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a directory of tokenizer files, or, if there is no such path, the tokenizer of a hub id.

        Raises:
          UserError: neither exists, the hub cannot be reached, or the files cannot be read.
        """
        name = str(path)
        if (found := look(path)) == "directory":
            return cls(_read_directory(Path(path)))
        if found:
            raise UserError(f"{name}: found a file; expected the directory of a tokenizer")
        if isinstance(path, Path) or not _is_hub_id(name):
            raise UserError(f"{name}: found no such directory; expected the directory of a tokenizer")
        return cls(_read_hub(name))

    def encode(self, text: str) -> list[int]:
        """The ids of a text of any length; no special token is added. A lone surrogate counts as "?"."""
        text = text.encode("utf-8", "replace").decode("utf-8")  # JSON can hold half a pair, tokenizers cannot
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=False).ids
        with self._lock:
            return self._inner(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, stripped; special tokens, and ids beyond the vocabulary, are left out."""
        known = [int(i) for i in ids if 0 <= i < self.size]
        with self._lock:
            text = self._inner.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.strip()

    def save(self, directory: str | Path) -> None:
        """Writes files from which `load` gives the same tokenizer."""
        self._inner.save_pretrained(str(directory))


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 by name of each file that a tokenizer may read; nothing if there is no such directory.

    Raises:
      UserError: they cannot be read.
    """
    if look(directory) != "directory":
        return {}
    try:
        files = sorted(p for p in directory.iterdir() if _is_read(p.name) and look(p) == "file")
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    except OSError as error:
        raise UserError(f"{error.filename or directory}: cannot be read ({error.strerror})") from error


def check_digests(directory: Path, expected: dict[str, str]) -> None:
    """Other bytes may give other ids, silently: the files must be those that `digests` was once asked about.

    Raises:
      UserError: they are not; it names the first that differs.
    """
    found = digests(directory)
    for name in sorted(filter(_is_read, found.keys() | expected.keys())):
        if found.get(name) != expected.get(name):
            problem = "nothing" if name not in found else "other content" if name in expected else "a file"
            wanted = "what was saved with the checkpoint" if name in expected else "none, as none was saved"
            raise UserError(
                f"{directory / name}: found {problem}; expected {wanted}: ids depend on it (put back what was there, "
                f"or begin another run with train.init_from={directory.parent} and data.tokenizer)"
            )


def _is_read(name: str) -> bool:
    return not name.startswith(".") and any(fnmatch.fnmatchcase(name, pattern) for pattern in _READ)


def _read_directory(directory: Path) -> Any:
    if not any(look(directory / name) == "file" for name in _FILES):
        raise UserError(f"{directory}: found no tokenizer; expected one of {', '.join(_FILES)}")
    transformers = import_transformers()
    try:
        if look(directory / "tokenizer.json") or _names_a_class(directory):
            inner = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True, **_DATA)
        else:
            inner = _read_sentencepiece(transformers, directory)
    except Exception as error:  # transformers, tokenizers and sentencepiece raise all kinds for a bad file
        raise UserError(
            f"{directory}: found tokenizer files that cannot be read ({_summary(error)}); "
            f"expected those of a transformers tokenizer"
        ) from error
    # Without its vocabulary file transformers makes up a tokenizer of a few pieces, silently.
    needed = list(type(inner).vocab_files_names.values())
    if needed and not any(look(directory / name) == "file" for name in needed):
        raise UserError(f"{directory}: found no vocabulary; expected {' or '.join(needed)}")
    return inner


def _names_a_class(directory: Path) -> bool:
    """False for the oldest T5 files: their class was told by the model's config.json, which lies elsewhere here."""
    file = directory / "tokenizer_config.json"
    return look(file) == "file" and "tokenizer_class" in json.loads(file.read_text(encoding="utf-8"))


def _read_sentencepiece(transformers: types.ModuleType, directory: Path) -> Any:
    """A bare spiece.model. T5's gets its 100 sentinels after the pieces; mT5's has them among its pieces."""
    try:
        return transformers.T5Tokenizer.from_pretrained(str(directory), local_files_only=True, **_DATA)
    except ValueError:
        pass
    try:
        return transformers.T5Tokenizer.from_pretrained(str(directory), local_files_only=True, extra_ids=0, **_DATA)
    except ValueError as error:  # says that tiktoken is missing, whatever the cause
        raise ValueError("spiece.model is damaged, or the package sentencepiece is missing") from error


def _read_hub(name: str) -> Any:
    transformers = import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(name, local_files_only=True, **_DATA)  # downloaded before
    except Exception:
        pass
    try:
        import huggingface_hub

        # transformers would try for a minute before it says that there is no network.
        huggingface_hub.model_info(name, timeout=_HUB_TIMEOUT)
        return transformers.AutoTokenizer.from_pretrained(name, **_DATA)
    except Exception as error:
        raise UserError(
            f"{name}: found neither a directory nor a reachable hub id ({_summary(error)}); "
            f"expected a directory of tokenizer files or a hub id"
        ) from error


def _is_hub_id(name: str) -> bool:
    """True for NAME and OWNER/NAME, the only forms a hub id has."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)


def import_transformers() -> types.ModuleType:
    """transformers, imported late (it takes seconds) and without its advice to install PyTorch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]
