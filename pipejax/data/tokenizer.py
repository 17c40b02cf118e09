"""Converts between text and token ids in the same way as the tokenizers of the transformers library."""

import fnmatch
import functools
import hashlib
import importlib
import itertools
import json
import logging
import os
import re
import sys
import threading
import types
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipejax.data import hub, tokenizer_file
from pipejax.data.tokenizer_file import TokenizerFile
from pipejax.model.backbone import Backbone
from pipejax.system import strict_json
from pipejax.system.errors import UserError, described_error, first_line
from pipejax.system.files import VOCABULARY, look, read_small, require_own, stand_in
from pipejax.system.strict_json import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# A tokenizer's directory has at least one of these files; ByT5's has only the last, because it needs no vocabulary.
FILES = ("tokenizer.json", "spiece.model", "tokenizer_config.json")
# Patterns for the names of all files that may affect the ids of transformers' tokenizers.
_VOCABULARIES = "*.model", "*.spm", "*.tiktoken", "*.tokenizer", "*vocab*", "merges*", "*bpe*", "dict*.txt"
_FILES_READ = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "config.json", *_VOCABULARIES),
    *("byte_maps.json", "emoji.json", "word_*.json"),
)
# Settings of a spiece.model or a tokenizer.json that T5Tokenizer ignores.
_IGNORED_SETTINGS = re.compile(
    r'byte_fallback"?: true|treat_whitespace_as_suffix: true|add_dummy_prefix: false|remove_extra_whitespaces: false'
    r'|model_type: (?:BPE|WORD|CHAR)|user_defined_symbols: "(?!.*<extra_id)[^"]*"'
    r'|"prepend_scheme": "never"'
)
# Arguments of every call that reads files: code from the directory is never run, and the user is not asked about it.
_NO_REMOTE_CODE = {"trust_remote_code": False}
_NEVER_EMPTY = re.compile("[A-Za-z0-9]")  # with such a character, some token remains under every tokenizer
_HUB_TIMEOUT = 10.0  # seconds to wait for the hub to say whether it has a name
_say_once = functools.cache(logger.warning)
SETTINGS = 2**20  # the most bytes of a settings file
WINDOW = 16  # the most tokens that are decoded again to find the text that one more token adds
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a piece that is a byte, for the decoder ByteFallback
# Decoding steps that change each piece separately, or join the pieces.
TOKENWISE = ("ByteLevel", "WordPiece", "BPEDecoder", "Metaspace", "Replace", "Strip", "Fuse")
_UNKNOWN = "\ue000"  # a character that is in no vocabulary; a byte-level vocabulary spells it in bytes


class Affixes(NamedTuple):
    """The special ids before and after the text of a source."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    once: bool = False  # whether the suffix is left out after a text that already ends with it, as by ByT5's tokenizer

    def around(self, ids: Sequence[int], most: int | None = None) -> list[int]:
        """Adds the special ids, and truncates the text so that the source has at most `most` ids (None: no limit)."""
        if most is not None:
            ids = ids[: max(most - len(self.prefix) - len(self.suffix), 0)]
        suffix = () if self.once and self._ends(ids) else self.suffix
        return [*self.prefix, *ids, *suffix][:most]

    def cut(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """Truncates a source to `most` ids; the suffix of the source is kept if there is one."""
        if len(ids) <= most:
            return ids
        suffix = self.suffix if self._ends(ids) else ()
        return [*ids[: max(most - len(suffix), 0)], *suffix][:most]

    def __str__(self) -> str:
        return f"{[*self.prefix]} before and {[*self.suffix]} after the text"

    def _ends(self, ids: Sequence[int]) -> bool:
        return (*ids[max(len(ids) - len(self.suffix), 0) :],) == self.suffix


class Tokenizer:
    """Encodes text without adding special tokens, and decodes ids without showing them. Threads may share an object."""

    size: int  # the largest id + 1
    unknown: int | None  # the id of unknown characters; None: the vocabulary covers all characters
    eos: int | None  # the id that ends a text; None: the files do not name it
    keeps_ends: bool  # whether transformers would keep the end of a long text; not supported

    def __init__(self, inner: "PreTrainedTokenizerBase | TokenizerFile") -> None:
        self._inner: Any = inner
        self._backend: Any = inner.backend_tokenizer if inner.is_fast else None
        if self._backend is not None:
            # Set once: transformers would set these on each call, which fails while another thread encodes.
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = inner.split_special_tokens
        self._lock = threading.Lock()
        self.keeps_ends = inner.truncation_side == "left"
        self.size = max(inner.get_vocab().values()) + 1
        self.unknown, self.eos = self._special("unk_token"), self._special("eos_token")

    @classmethod
    def load(cls, path: str | Path, *, copy_of: Path | None = None) -> "Tokenizer":
        """Reads the tokenizer of a directory or, if no such path exists, of a hub id.

        Raises:
          UserError: there is no tokenizer, or it cannot be read.
        """
        name = str(path)
        if (found := look(path)) == "directory":
            return cls(_read_directory(Path(path), copy_of or Path(path)))
        if found:
            raise UserError(name, found="a file", expected="the directory of a tokenizer")
        if isinstance(path, Path) or not (of_hub := hub.split_revision(name)):
            raise UserError(name, found="no such directory", expected="the directory of a tokenizer")
        return cls(_read_hub(name, *of_hub))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without truncation and without special tokens.

        A lone surrogate is encoded as "?".
        """
        # JSON may contain lone surrogates, for which tokenizers raise exceptions.
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int]
        if self._backend is not None:
            try:
                ids = self._backend.encode(text, add_special_tokens=False).ids
            except BaseException as error:
                _refuse(error, f"encode a text of {len(text)} characters")
                raise
        else:
            with self._lock:
                ids = self._inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the stripped text of the ids, without special tokens and without ids outside the vocabulary."""
        return self.decode_known([int(i) for i in ids if 0 <= i < self.size])

    def decode_known(self, ids: list[int]) -> str:
        """Returns the same as `decode`, for ids that are all in the vocabulary.

        This method does not check the ids, because a stream calls it for each token.
        """
        text: str
        if self._backend is not None:
            try:
                text = self._backend.decode(ids, skip_special_tokens=True)
            except BaseException as error:
                _refuse(error, f"decode {len(ids)} tokens")
                raise
        else:
            with self._lock:
                text = self._inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.strip()

    def change(self, text: str, ids: Sequence[int] | None = None) -> tuple[str, str] | None:
        """Returns the words of a text that its ids do not reproduce, and the words that replace them.

        If the ids reproduce the text, the result is None. `ids` are the ids of the text; None: the method encodes it.
        """
        before, after = text.split(), self.decode(self.encode(text) if ids is None else ids).split()
        if before == after:
            return None
        shorter = min(len(before), len(after))
        same = next((i for i in range(shorter) if before[i] != after[i]), shorter)
        most = shorter - same
        end = next((i for i in range(most) if before[-1 - i] != after[-1 - i]), most)
        was, now = (" ".join(words[same : len(words) - end]) for words in (before, after))
        return was, now

    def vanishes(self, text: str, ends: Collection[int] = ()) -> bool:
        """Returns whether a text has no tokens except `eos` and the end tokens `ends`."""
        every, rest = {*ends, *(() if self.eos is None else (self.eos,))}, text
        for piece in filter(None, map(self.piece, every)):
            rest = rest.replace(piece, "")
        if _NEVER_EMPTY.search(rest):  # the usual case, which needs no encoding
            return False
        return every.issuperset(self.encode(text))

    def piece(self, number: int) -> str:
        """Returns the piece of an id; "" if the id has none."""
        if not 0 <= number < self.size:
            return ""
        if self._backend is not None:
            return self._backend.id_to_token(int(number)) or ""
        with self._lock:
            return self._inner.convert_ids_to_tokens(int(number)) or ""

    @functools.cached_property
    def affixes(self) -> Affixes:
        """The ids that transformers adds to a text by the tokenizer's template, such as the final eos of T5."""
        if self._backend is not None:
            return self._affixes_of_template()
        build, text = self._inner.build_inputs_with_special_tokens, -1  # -1 is not an id
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ByT5's tokenizer warns about texts that end with an eos
            ids = build([text])
            place = ids.index(text)
            prefix, suffix = (*ids[:place],), (*ids[place + 1 :],)
            return Affixes(prefix, suffix, bool(suffix) and build([text, *suffix]) == ids)

    def _affixes_of_template(self) -> Affixes:
        """Finds the affixes by encoding a text with special tokens.

        The affixes are the ids before and after the text's own ids. The text is "a", "0", "." or else a piece that the
        vocabulary has; if none has ids, the affixes of an empty text are the suffix.
        """
        known = (piece for i in range(self.size) if (piece := self.piece(i)) and self.is_word(i))
        for text in itertools.chain("a0.", known):
            try:
                found = self._backend.encode(text, add_special_tokens=True)
            except Exception:  # tokenizers raises it for unknown characters if the vocabulary has no id for them
                continue
            own = [i for i, is_added in enumerate(found.special_tokens_mask) if not is_added]
            if own:
                return Affixes((*found.ids[: own[0]],), (*found.ids[own[-1] + 1 :],))
        return Affixes(suffix=(*self._backend.encode("", add_special_tokens=True).ids,))

    def unknown_is(self, number: int) -> bool:
        """Returns whether a number is the id of unknown characters."""
        try:
            return number in self.encode(_UNKNOWN)
        except Exception:  # tokenizers raises it if the vocabulary has no id for unknown characters
            return False

    def is_word(self, number: int) -> bool:
        """Returns whether an id stands for text.

        An id does not stand for text if the files declare it as a special token, or if its piece is in brackets, as <s>
        and [PAD].
        """
        piece, added = self.piece(number), self._inner.added_tokens_decoder.get(number)
        declared = number in self._inner.all_special_ids or (added is not None and added.special)
        return piece != "" and not declared and re.fullmatch(r"▁?(<.+>|\[.+\])", piece) is None

    def decoders(self) -> tuple[str, ...] | None:
        """Returns the names of the decoding steps of the tokenizers library.

        The result is () if pieces are joined by spaces, and None if the tokenizer does not use that library.
        """
        return None if self._backend is None else tuple(step["type"] for step in self._decoding_steps)

    def settles(self, token: int) -> bool:
        """Returns whether no later token changes the text of ids that end with `token`.

        An incomplete character at the end of the text does not count. The decoder ByteFallback decodes a run of bytes
        together: if any part of the run is invalid UTF-8, the decoder replaces the whole run.
        """
        if self._final_unit != "runs of bytes":
            return self._final_unit == "tokens"
        return BYTE.fullmatch(self.piece(token)) is None and self.decode_known([token]) != ""

    @functools.cached_property
    def _final_unit(self) -> str:
        """The unit of ids whose text does not depend on later tokens: "tokens", "runs of bytes", or "rows"."""
        if self._backend is None:
            return "tokens" if type(self._inner).__name__ == "ByT5Tokenizer" else "rows"
        fused, found = False, "tokens"
        for step in self._decoding_steps:
            kind = step["type"]
            is_wide = kind == "Strip" and step["stop"] > 0
            # A pattern of several characters, or a regular expression, may span two pieces.
            is_wide |= kind == "Replace" and len(step["pattern"].get("String", "  ")) > 1
            if kind == "ByteFallback" and not fused:
                found = "runs of bytes"
            elif kind not in TOKENWISE or (fused and is_wide):
                return "rows"
            fused |= kind == "Fuse"
        return found

    @functools.cached_property
    def _decoding_steps(self) -> list[JsonObject]:
        made = self._backend.decoder
        found = strict_json.loads(made.__getstate__()) if made is not None else {"decoders": []}
        steps: list[JsonObject] = found.get("decoders", [found])
        return steps

    def other_pieces(self, other: "Tokenizer") -> list[int]:
        """Returns the ids that both tokenizers have and that mean different pieces."""
        here, there = ({i: piece for piece, i in each._inner.get_vocab().items()} for each in (self, other))
        return sorted(i for i in here.keys() & there.keys() if here[i] != there[i])

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's files to a directory."""
        self._inner.save_pretrained(str(directory))

    def _special(self, name: str) -> int | None:
        """Returns the id of a special token, or None.

        The token is looked up first, because transformers would log an error for an absent one.
        """
        piece = self._inner.special_tokens_map.get(name)
        return None if piece is None else self._inner.convert_tokens_to_ids(str(piece))


class Growing:
    """Decodes a growing row incrementally: the returned pieces, joined, equal `Tokenizer.decode` of the whole row.

    A piece is returned once no later token can change it. Each new token decodes only the last few tokens, so the time
    for a token does not grow with the row.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the newest ids, whose text may still change
        self._given = ""  # the part of the text of `_ids` that was already returned

    def add(self, token: int) -> str:
        """Adds a token; returns the text that became final with it."""
        if self._tokenizer is None or not 0 <= token < self._tokenizer.size:
            return ""
        self._ids.append(token)
        if not self._tokenizer.settles(token):
            return ""
        text = self._tokenizer.decode_known(self._ids)
        if text.endswith("\ufffd"):  # may be the beginning of a character
            return ""
        added, self._given = text[len(self._given) :], text
        if len(self._ids) >= WINDOW:
            later = self._tokenizer.decode_known(self._ids[WINDOW // 2 :])
            if later and text.endswith(later):
                self._ids, self._given = self._ids[WINDOW // 2 :], later
        return added

    def rest(self) -> str:
        """Returns the remaining text at the end of the row."""
        text = self._tokenizer.decode_known(self._ids) if self._tokenizer and self._ids else ""
        added, self._given = text[len(self._given) :], text
        return added


def _refuse(error: BaseException, work: str) -> None:
    """Raises a UserError for a failure inside the tokenizers library.

    Panics of the library, for example of a regular expression that takes too long, derive only from BaseException.
    """
    if type(error) is Exception or type(error).__name__ == "PanicException":
        raise UserError("tokenizer", f"cannot {work} ({first_line(error)[:200]})") from error


def check_special_ids(tokenizer: Tokenizer, model: Backbone, place: str, name: str, *, trained: bool = False) -> None:
    """Checks the model's end tokens against the tokenizer; `warn_of_start` checks the start token.

    Args:
      tokenizer: the tokenizer of the data.
      model: the architecture.
      place: the name of the model's setting, for messages.
      name: the name of the tokenizer, for messages.
      trained: whether the model was trained with this tokenizer; then the tokenizer's eos need not be an end token.

    Raises:
      UserError: the tokenizer's eos is not an end token of the model, or an end token stands for text or for unknown
        characters.
    """
    ends = model.end_token_ids

    def found(end: int) -> str:
        piece = tokenizer.piece(end)
        return f"{end}, " + (f"which is {piece!r} in {name}" if piece else f"which is not an id of {name}")

    if tokenizer.eos is not None and tokenizer.eos not in ends and not trained:
        own = f"{tokenizer.piece(tokenizer.eos)!r} = {tokenizer.eos} ends a text"
        if len(ends) == 1:
            raise UserError(place, found=f"{found(ends[0])}, where {own}", expected="the same end token in both")
        raise UserError(
            place, found=", ".join(map(str, ends)), expected=f"ids that include {tokenizer.eos}, since {own} in {name}"
        )
    for end in ends:
        if tokenizer.is_word(end):
            raise UserError(place, found=found(end), expected="an id without text, since it ends sources and rows")
        if not tokenizer.unknown_is(end):
            continue
        if tokenizer.unknown == end:
            raise UserError(
                place,
                found=f"{found(end)} and is also its unknown token",
                expected="an end token that is not the unknown token",
            )
        unknown = (
            "none" if tokenizer.unknown is None else f"{tokenizer.piece(tokenizer.unknown)!r} = {tokenizer.unknown}"
        )
        logger.warning(
            f"{place}: found {found(end)}; by the vocabulary this end token also stands for unknown characters, "
            f"although unk_token is {unknown}. The token is used: an unknown character ends a source, and is left out "
            "of rows"
        )


def source_affixes(tokenizer: Tokenizer | None, model: Backbone, special_tokens: str) -> Affixes:
    """Returns the special ids that are added to a source.

    The ids equal the ids of transformers, unless `data.special_tokens` is "eos". This setting adds a single eos, as
    older releases did for all tokenizers but Gemma's. Without a tokenizer, sources are ids that end with an eos.
    """
    own_eos = None if tokenizer is None else tokenizer.eos
    eos = Affixes(suffix=(own_eos if own_eos in model.end_token_ids else model.eos_token_id,))
    if tokenizer is None:
        return eos
    own = tokenizer.affixes
    if special_tokens != "eos" or own._replace(once=False) == eos:
        return own
    added = own.prefix + own.suffix
    starts = added[:1] == (model.decoder_start_token_id,) != eos.suffix
    return Affixes(added[:1], added[1:]) if starts else eos


def warn_of_start(tokenizer: Tokenizer, model: Backbone, place: str, name: str) -> None:
    """Logs a warning if the id that every row begins with stands for text.

    The arguments are as for `check_special_ids`.
    """
    start = model.decoder_start_token_id
    if start != tokenizer.eos and (tokenizer.is_word(start) or start == tokenizer.unknown):
        logger.warning(
            f"{place}: found {start}, which is {tokenizer.piece(start)!r} in {name}; it is used: "
            "rows begin with it, which is correct only if the weights were trained with it"
        )


def digests(directory: Path) -> dict[str, str]:
    """Returns, by file name, the SHA-256 of each file of a directory from which a tokenizer can be read."""
    if look(directory) != "directory":
        return {}
    try:
        files = sorted(p for p in directory.iterdir() if _is_read(p.name) and look(p) == "file")
        return {p.name: hashlib.sha256(read_small(p, VOCABULARY)).hexdigest() for p in files}
    except OSError as error:
        raise UserError(error.filename or directory, f"cannot be read ({error.strerror})") from error


def check_digests(directory: Path, expected: dict[str, str]) -> None:
    """Raises a UserError unless the tokenizer files still have the `expected` digests.

    Changed files could give other ids without an error.
    """
    found = digests(directory)
    for name in sorted(filter(_is_read, found.keys() | expected.keys())):
        if found.get(name) != expected.get(name):
            problem = "nothing" if name not in found else "other content" if name in expected else "a file"
            wanted = "what was saved with the checkpoint" if name in expected else "none, as none was saved"
            raise UserError(
                directory / name,
                found=problem,
                expected=f"{wanted}: token ids depend on this file",
                hint="restore the file, or start another run with "
                f"train.init_from={directory.parent} and data.tokenizer",
            )


def _is_read(name: str, patterns: Sequence[str] = _FILES_READ) -> bool:
    return not name.startswith(".") and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _read_directory(directory: Path, named: Path) -> "PreTrainedTokenizerBase | TokenizerFile":
    """Reads a tokenizer's directory, with the tokenizers library alone if possible, else with transformers.

    Args:
      directory: the directory.
      named: its name in messages.

    Raises:
      UserError: there is no tokenizer, or a file is damaged or too large.
    """
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise UserError(named, f"cannot be read ({error.strerror})") from error
    there = " and ".join(name for name in names if _is_read(name, _VOCABULARIES))
    if not any(look(directory / name) == "file" for name in FILES):
        found = f"{there}, but no file that names the tokenizer class" if there else "no tokenizer"
        raise UserError(named, found=found, expected=f"one of {', '.join(FILES)}")
    for file in (directory / name for name in names if _is_read(name) and look(directory / name) == "file"):
        require_own(file)
        if (size := file.stat().st_size) > VOCABULARY:
            raise UserError(file, found=f"{size:,} bytes", expected=f"at most {VOCABULARY:,}")
        if file.suffix == ".json" and size <= SETTINGS:  # a larger file is a vocabulary, whose reader reports errors
            try:
                strict_json.loads(file.read_bytes())
            except strict_json.DuplicateKey as error:
                raise UserError(file, found=error.found, expected=error.expected) from error
            except (ValueError, RecursionError):
                pass  # reported below
    try:
        return tokenizer_file.read_tokenizer_file(directory)
    except tokenizer_file.Unsuited as unsuited:
        if "transformers" not in sys.modules:  # else it is already imported and takes no time
            logger.info(
                f"{named}: transformers is imported to read the tokenizer, which takes seconds, because {unsuited}"
            )
    except strict_json.DuplicateKey as error:
        raise UserError(named / "tokenizer.json", found=error.found, expected=error.expected) from error
    except Exception:  # a damaged file; the error is reported below
        pass
    transformers = import_transformers()
    try:
        _check_sentencepiece(directory)
        settings = directory / "tokenizer_config.json"  # the oldest T5 files have the class in the model's config.json
        if look(directory / "tokenizer.json") or (
            look(settings) == "file" and "tokenizer_class" in strict_json.loads(settings.read_text(encoding="utf-8"))
        ):
            inner = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True, **_NO_REMOTE_CODE)
        else:
            inner = _read_sentencepiece(transformers, directory)
    except Exception as error:  # the libraries raise exceptions of many kinds for a bad file
        reason = _damage(directory) or described_error(error).replace(str(directory), str(named))
        raise UserError(
            named,
            found=f"tokenizer files that cannot be read ({reason})",
            expected="the files of a transformers tokenizer",
        ) from error
    # Without the vocabulary file, transformers makes a tokenizer with a few pieces and reports no error.
    needed = list(type(inner).vocab_files_names.values())
    if needed and not any(look(directory / name) == "file" for name in needed):
        found = f"{there}, which its {type(inner).__name__} does not read" if there else "no vocabulary"
        raise UserError(named, found=found, expected=" or ".join(needed))
    _follow(inner, directory, str(named))
    return inner


def _follow(inner: "PreTrainedTokenizerBase", directory: Path, name: str) -> None:
    """Corrects a tokenizer of transformers whose class ignores settings of its files, or logs the ignored settings."""
    _keep_unknown(inner, directory)
    if type(inner).__name__.startswith("T5") and (lost := _ignored_settings(directory)):
        _say_once(
            f"{name}: ignored, because T5Tokenizer of transformers 5 ignores them: "
            f"{', '.join(lost)}; ids may differ from training. A tokenizer.json with the class "
            "PreTrainedTokenizerFast is read completely"
        )


def _keep_unknown(inner: "PreTrainedTokenizerBase", directory: Path) -> None:
    """Sets the id of unknown characters to the id in the vocabulary's file, if the tokenizer's class set another one.

    T5Tokenizer always sets 2. The id of another class is not changed if it is the id of unk_token.
    """
    if not inner.is_fast or type(inner.backend_tokenizer.model).__name__ != "Unigram":
        return
    backend, is_t5 = inner.backend_tokenizer, type(inner).__name__.startswith("T5")
    if look(file := directory / "tokenizer.json"):
        own = strict_json.loads(file.read_bytes())["model"].get("unk_id")
    else:  # classes other than T5's renumber the pieces of a spiece.model
        own = _read_proto(directory).trainer_spec.unk_id if is_t5 else None
    if own is None or (is_t5 and own == 2):
        return
    content = strict_json.loads(backend.to_str())
    taken = content["model"]["unk_id"]
    if own == taken or not (is_t5 or taken is None or backend.id_to_token(taken) != inner.unk_token):
        return
    content["model"]["unk_id"] = own
    inner._tokenizer = type(backend).from_str(json.dumps(content))


def _ignored_settings(directory: Path) -> list[str]:
    """Returns the settings of a vocabulary that T5Tokenizer replaces by the settings of T5."""
    if look(file := directory / "tokenizer.json"):
        return _IGNORED_SETTINGS.findall(json.dumps(strict_json.loads(file.read_bytes())))
    model = _read_proto(directory)
    return _IGNORED_SETTINGS.findall(f"{model.trainer_spec}{model.normalizer_spec}")


def _read_proto(directory: Path) -> Any:
    from sentencepiece import sentencepiece_model_pb2 as proto

    return proto.ModelProto.FromString((directory / "spiece.model").read_bytes())  # type: ignore[attr-defined]


def _read_sentencepiece(transformers: types.ModuleType, directory: Path) -> "PreTrainedTokenizerBase":
    """Reads a spiece.model without other files.

    T5 has 100 sentinel tokens after the pieces; mT5 has its sentinels among the pieces.
    """
    try:
        return transformers.T5Tokenizer.from_pretrained(str(directory), local_files_only=True, **_NO_REMOTE_CODE)
    except ValueError:
        return transformers.T5Tokenizer.from_pretrained(
            str(directory), local_files_only=True, extra_ids=0, **_NO_REMOTE_CODE
        )


def _check_sentencepiece(directory: Path) -> None:
    """Raises a ValueError if the vocabulary is a damaged spiece.model.

    Without this check, transformers would instead ask to install tiktoken.
    """
    if look(directory / "tokenizer.json") or not look(file := directory / "spiece.model"):
        return
    import sentencepiece

    try:
        sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{file.name} is damaged") from error


def _damage(directory: Path) -> str:
    """Names the first damaged file of a tokenizer's directory; "" if none is."""
    for file in sorted(path for path in directory.iterdir() if _is_read(path.name)):
        if found := stand_in(file):
            return f"{file.name} is {found}"
        if file.suffix == ".json":
            try:
                strict_json.loads(file.read_bytes())
            except (OSError, ValueError, RecursionError) as error:
                return f"{file.name} is not JSON: {first_line(error)}"
    return ""


def _read_hub(name: str, of_hub: str, revision: JsonObject) -> "PreTrainedTokenizerBase":
    """Reads the tokenizer of a hub id, from the local cache if it was downloaded before.

    Args:
      name: the id with its revision, for messages.
      of_hub: the id.
      revision: the client's arguments for the revision.

    Raises:
      UserError: the id does not exist, or the hub cannot be reached.
    """
    import huggingface_hub

    transformers, at = import_transformers(), _NO_REMOTE_CODE | revision
    try:
        # This succeeds if the tokenizer was downloaded before.
        inner = transformers.AutoTokenizer.from_pretrained(of_hub, local_files_only=True, **at)
    except Exception:
        try:
            # The hub is queried first, because without a network transformers would retry for a minute.
            huggingface_hub.model_info(of_hub, timeout=_HUB_TIMEOUT, **revision)
            inner = transformers.AutoTokenizer.from_pretrained(of_hub, **at)
        except Exception as error:
            raise UserError(
                name,
                found=f"neither a directory nor a reachable hub id ({hub.reason(error)})",
                expected="a directory of tokenizer files or a hub id",
            ) from error
    files = (huggingface_hub.try_to_load_from_cache(of_hub, file, **revision) for file in FILES[:2])
    if file := next((file for file in files if isinstance(file, str)), ""):
        _follow(inner, Path(file).parent, name)
    return inner


def import_transformers() -> types.ModuleType:
    """Imports transformers, which takes seconds, and suppresses its advice to install PyTorch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return importlib.import_module("transformers")
