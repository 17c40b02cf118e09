"""From the name of a Hugging Face model to a checkpoint: converted once, and kept in the user's cache."""

import hashlib
from pathlib import Path

from pipejax.convert.huggingface import from_hf, locate
from pipejax.system import compile_cache
from pipejax.system.cli import note
from pipejax.system.errors import UserError
from pipejax.system.files import absolute, look, new_directory


def find(source: str | Path) -> Path:
    """The checkpoint that is meant: the directory itself, or what a Hugging Face directory or a hub's name becomes.

    A directory's conversion is known by the names, sizes and times of its files: if they change, it is converted anew.
    The hub is not asked for a name whose newest download was converted already.
    """
    path = Path(source)
    is_hugging_face = look(path) == "directory" and (path / "config.json").is_file()
    if is_hugging_face and any((path / kind).is_dir() for kind in ("checkpoints", "best")):
        return path
    is_name = isinstance(source, str) and not look(path) and not path.is_absolute() and source.count("/") == 1
    if not (is_hugging_face or (is_name and not path.parent.is_dir())):
        return path
    cache = compile_cache.safe_directory()
    directory = path if is_hugging_face else _downloaded(str(source))
    kept = cache and directory and _place(cache, absolute(path).name, directory)
    if directory is None or (is_name and not (kept and look(kept) == "directory")):
        directory = locate(str(source))
    if cache is None:
        raise UserError(
            f"{source}: found a Hugging Face model and no cache to keep its conversion in; expected one "
            f"({compile_cache.VARIABLE}), or a checkpoint: pipejax convert from-hf"
        )
    target = _place(cache, absolute(path).name, directory)
    if look(target) != "directory":
        note(f"{source}: converting it once, into {target}")
        with new_directory(target) as staging:
            note(f"{source}: {from_hf(source, staging / 'checkpoint')}")
    return target / "checkpoint"


def _downloaded(name: str) -> Path | None:
    """The files of a hub's model that are here already, of the version that was asked for last."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # the hub client raises many kinds; `locate` says in one line if there is no such model
        return None


def _place(cache: Path, name: str, directory: Path) -> Path:
    """Where the conversion of a directory is kept: by the names, sizes and times of change of its files."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    facts = [(path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((str(directory.resolve()), facts)).encode()).hexdigest()[:16]
    return cache / "models" / f"{name}-{digest}"
