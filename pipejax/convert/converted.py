"""Finds the checkpoint for the name of a Hugging Face model: it is converted once and kept in the user's cache."""

import contextlib
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipejax.checkpoint import CONVERSION
from pipejax.convert import description, generation, peft_adapters
from pipejax.convert.huggingface import AUXILIARY, TOKENIZER_FILES, from_hf, locate
from pipejax.convert.tensor_files import ADAPTER, WHOLE, weight_files
from pipejax.data import hub
from pipejax.system import VERSION, compile_cache
from pipejax.system.cli import note
from pipejax.system.errors import UserError
from pipejax.system.files import absolute, look, new_directory, require_own

# The small files that affect a conversion.
SETTINGS = ("config.json", generation.FILE, description.FILE, peft_adapters.CONFIG, AUXILIARY, *TOKENIZER_FILES)
PIECE = 2**24  # bytes that one thread hashes at a time


def find_checkpoint(source: str | Path) -> Path:
    """Returns the directory of a checkpoint: the given one, or the cached conversion of a Hugging Face model.

    `source` is a directory or a hub id. A conversion is identified by the content of the files, the version of pipejax
    and the version of the conversion: if one of them changes, the directory is converted again. If the newest download
    of a hub model, or of an adapter's base, was converted before, the hub is not contacted.

    Raises:
      UserError: there is no cache to write to, or the model cannot be converted.
    """
    path = Path(source)
    is_hugging_face = look(path) == "directory" and (path / "config.json").is_file()
    if is_hugging_face and any((path / kind).is_dir() for kind in ("checkpoints", "best")):
        return path
    of_hub = hub.split_revision(source) if isinstance(source, str) and not look(path) else None
    if of_hub and ("/" not in of_hub[0] or Path(of_hub[0]).parent.is_dir()):
        of_hub = None
    if not (is_hugging_face or of_hub):
        return path
    cache = compile_cache.safe_directory()
    if cache is None:
        raise UserError(
            source,
            found="a Hugging Face model, and no cache for its conversion",
            expected=f"a cache ({compile_cache.VARIABLE}), or a checkpoint: pipejax convert from-hf",
        )
    target, name = None, absolute(path).name
    if of_hub or peft_adapters.is_adapter(path):
        with contextlib.suppress(UserError):  # a part of the model may not be downloaded yet
            target = _place(cache, name, str(source), at_once=True)
    if target is None or look(target) != "directory":
        target = _place(cache, name, str(source))
    if look(target) != "directory":
        if not compile_cache.is_writable(cache):
            raise UserError(
                source,
                found=f"no conversion of this model in {cache}, which this user may not write to",
                expected=f"another cache ({compile_cache.VARIABLE}=DIR), or a checkpoint: pipejax convert from-hf",
            )
        note(f"{source}: converting once into {target}")
        with new_directory(target) as staging:
            note(f"{source}: {from_hf(source, staging / 'checkpoint')}")
    return target / "checkpoint"


def _place(cache: Path, name: str, source: str, *, at_once: bool = False) -> Path:
    """Returns the cache directory for the conversion of a source.

    A digest of all files that affect the conversion is a part of the directory's name.
    """
    places = [(directory := locate(source, at_once=at_once), WHOLE)]
    if peft_adapters.is_adapter(directory):
        places = [(directory, ADAPTER), (locate(peft_adapters.base_of(directory), at_once=at_once), WHOLE)]
    facts: list[object] = [VERSION, CONVERSION]
    for place, openers in places:
        known = [file for file in (place / name for name in SETTINGS) if look(file) == "file"]
        for file in [*known, *weight_files(place, openers)]:
            require_own(file)
            facts.append((file.name, _digest_of_content(file)))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return cache / "models" / f"{name}-{digest}"


def _digest_of_content(file: Path) -> str:
    """Returns a digest of a file's content, in 64 hexadecimal digits.

    The digest of a large file in the hub's cache is its name there, the SHA-256 of the content. The digest of another
    file is the SHA-256 of the digests of its pieces.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    real = file.resolve()
    if re.fullmatch("[0-9a-f]{64}", real.name) and real.is_relative_to(Path(HF_HUB_CACHE).resolve()):
        return real.name

    def of_piece(begin: int) -> bytes:
        return hashlib.sha256(os.pread(content.fileno(), PIECE, begin)).digest()

    with file.open("rb") as content, ThreadPoolExecutor() as pool:
        pieces = pool.map(of_piece, range(0, os.fstat(content.fileno()).st_size, PIECE))
        return hashlib.sha256(b"".join(pieces)).hexdigest()
