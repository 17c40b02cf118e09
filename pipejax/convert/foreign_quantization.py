"""Detects weights quantised by other libraries, which cannot be read, and quantisation settings, which are ignored."""

from collections.abc import Iterator
from pathlib import Path

from pipejax.convert.tensor_files import read_json
from pipejax.system.files import look

KEYS = ("quantization_config", "compression_config")  # keys in config.json; the second is an older name
FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # files of GPTQ, AWQ and ModelOpt


def find_quantization(directory: Path) -> str:
    """Returns the place and the method of a directory's quantisation; "" if there is no sign of one."""
    for place, value in _settings(directory / "config.json"):
        if isinstance(value, dict):
            of_bits = any(key.startswith(("load_in_", "bnb_")) for key in value)
            method = value.get("quant_method") or ("bitsandbytes" if of_bits else "a method without a name")
        else:
            method = value
        return f"{place} ({method!r:.40})"
    return next((name for name in FILES if look(directory / name) == "file"), "")


def _settings(file: Path) -> Iterator[tuple[str, object]]:
    """Yields the quantisation settings in config.json with their keys: of the model, and of its parts."""
    parts: list[tuple[str, object]] = [("", read_json(file))]
    for prefix, part in parts:
        if not isinstance(part, dict):
            continue
        yield from ((f"{file.name}: {prefix}{key}", part[key]) for key in KEYS if part.get(key))
        parts += [(f"{prefix}{key}.", part.get(key)) for key in ("encoder", "decoder", "text_config") if part.get(key)]
