"""Reads tokenizer.json with the tokenizers library alone, because importing transformers takes seconds.

transformers determines from tokenizer_config.json and other files which pieces are added and how text is split. A
directory is read here only if every file and setting that may affect ids is known to give the same ids.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipejax.system import strict_json
from pipejax.system.files import look
from pipejax.system.strict_json import JsonMapping, JsonObject

if TYPE_CHECKING:
    import tokenizers

MAIN, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
OTHERS = ("config.json", "added_tokens.json")  # may name another class, or other pieces
AS_IT_IS = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes that use tokenizer.json without changes
T5 = ("T5Tokenizer", "T5TokenizerFast")  # classes that use only its vocabulary and its normalisation of characters
# Settings that do not affect ids, or that `read_tokenizer_file` checks, such as special tokens.
KNOWN = {
    *("tokenizer_class", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "extra_ids"),
    *("split_special_tokens", "clean_up_tokenization_spaces", "legacy"),
    *("sp_model_kwargs", "add_prefix_space", "special_tokens_map_file", "name_or_path", "backend", "is_local"),
    *("local_files_only", "processor_class", "chat_template", "model_input_names", "model_max_length", "max_length"),
    *("padding_side", "truncation_side", "stride", "truncation_strategy", "unk_id"),
}


class Unsuited(Exception):
    """Raised if transformers has to read the directory; the message says why."""


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer with the attributes of transformers' tokenizers that `pipejax.data.tokenizer.Tokenizer` uses."""

    backend_tokenizer: "tokenizers.Tokenizer"
    special_tokens_map: dict[str, str]  # such as "eos_token" -> "</s>"
    split_special_tokens: bool
    files: dict[str, bytes]  # the files by name, as read
    truncation_side: str = "right"
    is_fast: bool = True

    @property
    def added_tokens_decoder(self) -> "dict[int, tokenizers.AddedToken]":
        """The added tokens by id, as in transformers."""
        found: dict[int, tokenizers.AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens, as in transformers."""
        return [self.convert_tokens_to_ids(piece) for piece in self.special_tokens_map.values()]

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids by piece, as in transformers."""
        found: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

    def convert_tokens_to_ids(self, piece: str) -> int:
        """Returns the id of a piece, as in transformers."""
        found = self.backend_tokenizer.token_to_id(piece)
        assert found is not None, "`read_tokenizer_file` saw to it"
        return found

    def save_pretrained(self, directory: str) -> None:
        """Writes the files as they were read, so that transformers reads the same tokenizer from them."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (Path(directory) / name).write_bytes(content)


def read_tokenizer_file(directory: Path) -> TokenizerFile:
    """Reads a tokenizer's directory.

    Raises:
      Unsuited: a file or setting may affect ids in a way that this module does not know.
    """
    import tokenizers

    if other := next((name for name in OTHERS if look(directory / name)), None):
        raise Unsuited(f"{other} is in the same directory")
    names = [name for name in (MAIN, SETTINGS, SPECIAL) if look(directory / name) == "file"]
    if lacking := next((name for name in (MAIN, SETTINGS) if name not in names), None):
        raise Unsuited(f"there is no {lacking}")
    files = {name: (directory / name).read_bytes() for name in names}
    content, settings, special = (strict_json.loads(files.get(name, b"{}")) for name in (MAIN, SETTINGS, SPECIAL))
    if "added_tokens_decoder" not in settings:  # without this key, transformers does not read the map
        settings |= special
    named = {key: text for key, value in settings.items() if (text := _special(key, value))}
    kind = settings.get("tokenizer_class")
    if kind not in (*AS_IT_IS, *T5):
        raise Unsuited(f"{SETTINGS} has the tokenizer_class {kind!r}")
    if unknown := next((key for key in settings if key not in KNOWN and not key.endswith("_token")), None):
        raise Unsuited(f"{SETTINGS} has the key {unknown}")
    if kind in T5:
        defaults = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        named |= {key: piece for key, piece in defaults.items() if key not in settings}
    _check_added(content, settings, {*named.values(), *_further(settings, kind)})
    backend = tokenizers.Tokenizer.from_buffer(files[MAIN])
    if kind in T5:
        _as_t5(backend, content, named["eos_token"])
    for token in content["added_tokens"]:
        if backend.token_to_id(token["content"]) != token["id"]:
            raise Unsuited(f"{token['content']!r} is not {token['id']} in the vocabulary of {MAIN}")
    side = (content.get("truncation") or {}).get("direction", settings.get("truncation_side") or "right").lower()
    return TokenizerFile(backend, named, bool(settings.get("split_special_tokens")), files, side)


def _special(key: str, value: object) -> str:
    if not key.endswith("_token"):
        return ""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _further(settings: JsonMapping, kind: str) -> Iterator[str]:
    """Yields the special tokens without a name, by default the sentinels."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        given = settings.get(key) or []
        if not isinstance(given, list) or not all(isinstance(piece, str) for piece in given):
            raise Unsuited(f"{key} in {SETTINGS} is not a list of texts")
        yield from given
    if kind in T5:
        yield from (f"<extra_id_{i}>" for i in range(settings.get("extra_ids", 100)))


def _check_added(content: JsonMapping, settings: JsonMapping, special: set[str]) -> None:
    """Raises Unsuited unless both files have the same added pieces, and each special token is one of them."""
    added = {str(token["id"]): {key: token[key] for key in token if key != "id"} for token in content["added_tokens"]}
    if settings.get("added_tokens_decoder", added) != added:
        raise Unsuited(f"{SETTINGS} has other added tokens than {MAIN}")
    if lacking := special - {token["content"] for token in added.values() if token["special"]}:
        raise Unsuited(f"{min(lacking)!r} is not a special token of {MAIN}")
    if content.get("padding"):
        raise Unsuited(f"{MAIN} has padding")  # the padding names a token


def _as_t5(backend: "tokenizers.Tokenizer", content: JsonMapping, eos: str) -> None:
    """Reduces a tokenizer.json to its vocabulary and normalisation of characters, and sets T5's rules for the rest."""
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    model, given = content["model"], content.get("normalizer") or {}
    if model["type"] != "Unigram" or model["unk_id"] is None or model.get("byte_fallback"):
        raise Unsuited(f"{MAIN} has another model than T5's")
    if "never" in str(content.get("pre_tokenizer")):
        raise Unsuited(f"{MAIN} puts no space before a text")
    if any(token["normalized"] for token in content["added_tokens"]):
        raise Unsuited(f"{MAIN} has an added token that is normalized")
    steps = given["normalizers"] if given.get("type") == "Sequence" else [given]
    characters = next((step["precompiled_charsmap"] for step in steps if step.get("type") == "Precompiled"), None)
    pieces: JsonObject = {"replacement": "▁", "prepend_scheme": "always", "split": True}
    backend.normalizer = normalizers.Precompiled(base64.b64decode(characters)) if characters else None
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**pieces)]
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(words), decoders.Metaspace(**pieces)
    ends = [("</s>", backend.token_to_id(eos))]
    backend.post_processor = processors.TemplateProcessing(single=["$A", "</s>"], special_tokens=ends)
