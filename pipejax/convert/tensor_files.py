"""Opens files of named tensors (safetensors, torch and flax), and reads one tensor at a time.

The module also detects weights quantised by other libraries, which cannot be read, and quantisation settings, which are
ignored. It does not depend on the model.
"""

import fnmatch
import os
import pickle
import reprlib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pipejax import registry
from pipejax.system import strict_json
from pipejax.system.errors import UserError, first_line
from pipejax.system.files import SMALL, look, read_small, require_own, stand_in

# The accepted dtypes: safetensors' name, NumPy's name.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Unsupported weight formats, the more likely ones first, and how to convert them.
RESAVE = "torch weights: load them into a T5 of transformers, and save it with save_pretrained as safetensors"
OTHERS = {
    "tf_model.h5": "TensorFlow weights: load them with transformers 4 (from_tf=True), and save with save_pretrained",
    "flax_model-*.msgpack": "a part of flax weights: save them in one file",
    "adapter_model.*": ("a LoRA adapter without its adapter_config.json, which describes what it adapts"),
    "model.*.safetensors": "a variant: rename it to model.safetensors",
    "*.safetensors": "another name: rename it to model.safetensors if these are the weights",
    "rust_model.ot": "Rust weights: convert the files that it was made from",
    "*.gguf": "llama.cpp weights: convert the files that it was made from",
    "*.onnx": "an export: convert the files that it was made from",
    **dict.fromkeys(("*.bin", "*.pt", "*.pth", "*.ckpt*"), RESAVE),
}
# Exceptions that a damaged file of tensors causes.
DAMAGES = (
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    LookupError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
LONGEST = 500  # characters of a tensor's name
# Files of a training run that look like weights.
NO_WEIGHTS = ("training_args*", "optimizer*", "scheduler*", "rng_state*", "scaler*", "random_states*")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file that is not read yet, with the name, shape and layout that it has in torch."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # the name that safetensors uses for the dtype
    fetch: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        """Reads the tensor.

        Raises:
          UserError: the tensor cannot be read, or one of its values is not finite.
        """
        try:
            array = self.fetch()
        except (SafetensorError, OSError, *DAMAGES) as error:
            raise damaged(self.file, f"the tensor {self.name}", error) from error
        check_finite(f"{self.file}: {self.name}", array)
        return array


def open_tensors(directory: Path, openers: "Openers | None" = None) -> tuple[Path, dict[str, Stored]]:
    """Opens the weights of a directory.

    Args:
      directory: the directory.
      openers: functions by file name, in order of preference; None: WHOLE.

    Returns:
      The first existing file of weights, or the index of its shards; and the tensors by name.

    Raises:
      UserError: there is no file of weights, or it is damaged.
    """
    openers = openers or WHOLE
    for file, opener in ((directory / name, opener) for name, opener in openers.items()):
        if look(file) == "file":
            require_own(file)
            tensors = opener(file)
            for name, stored in tensors.items():
                if not name.isprintable() or len(name) > LONGEST:
                    raise UserError(
                        stored.file, found=f"the name {name!r:.60}", expected=f"at most {LONGEST} printable characters"
                    )
                if stored.dtype not in DTYPES:
                    raise UserError(
                        f"{stored.file}: {name}", found=f"dtype {stored.dtype}", expected=f"one of {', '.join(DTYPES)}"
                    )
            return file, tensors
    others = [(file.name, advice) for pattern, advice in OTHERS.items() for file in sorted(directory.glob(pattern))]
    weights = (pair for pair in others if not any(fnmatch.fnmatchcase(pair[0], other) for other in NO_WEIGHTS))
    found = next((f"only {name} ({advice})" for name, advice in weights), "no weights")
    raise UserError(directory, found=found, expected=f"one of {', '.join(openers)}")


def weight_files(directory: Path, openers: "Openers") -> list[Path]:
    """Returns the files of a directory from which `open_tensors` would read."""
    found = next((directory / name for name in openers if look(directory / name) == "file"), None)
    if found is None or found.suffix != ".json":
        return [found] if found else []
    return [found, *map(found.with_name, dict.fromkeys(_shards_of(found).values()))]


def read_json(file: Path) -> dict[str, object]:
    """Reads the JSON object in a file of a downloaded directory.

    Raises:
      UserError: the file is not a JSON object.
    """
    try:
        if look(file):
            require_own(file)
        values = strict_json.loads(read_small(file).decode("utf-8-sig"))
    except OSError as error:
        raise UserError(file, f"cannot be read ({error.strerror})", expected="a JSON object") from error
    except strict_json.DuplicateKey as error:
        raise UserError(file, found=error.found, expected=error.expected) from error
    except (ValueError, RecursionError) as error:
        if found := stand_in(file):
            raise UserError(file, found=found, expected="a JSON object") from error
        raise UserError(file, found=f"no JSON ({first_line(error)})", expected="a JSON object") from error
    if not isinstance(values, dict):
        raise UserError(file, found=f"{reprlib.repr(values):.40}", expected="a JSON object")
    return values


def check_finite(where: str, array: np.ndarray) -> None:
    """Raises a UserError if a value is NaN or infinite."""
    if wrong := array.size - np.count_nonzero(np.isfinite(array)):
        raise UserError(where, found=f"{wrong} values that are NaN or infinite", expected="finite numbers")


def damaged(file: Path, expected: str, error: Exception) -> UserError:
    """Returns the UserError for a file that cannot be read; it names a placeholder, such as a git-LFS pointer."""
    found = stand_in(file) or f"a damaged file ({first_line(error)})"
    return UserError(file, found=found, expected=expected)


def _open_safetensors(file: Path) -> dict[str, Stored]:
    """Opens the tensors of a safetensors file by name.

    Raises:
      UserError: the file is damaged, cannot be read, or has too large a header.
    """
    try:
        with file.open("rb") as content:  # safetensors would report every file that cannot be opened as missing
            header = int.from_bytes(content.read(8), "little")
    except OSError as error:
        raise UserError(file, f"cannot be read ({error.strerror})", expected="safetensors") from error
    if SMALL < header <= file.stat().st_size:
        raise UserError(file, found=f"a header of {header:,} bytes", expected=f"at most {SMALL:,}")
    try:
        handle: Any = safe_open(file, framework="numpy")
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise damaged(file, "safetensors", error) from error
    return {
        name: Stored(file, name, tuple(part.get_shape()), part.get_dtype(), partial(handle.get_tensor, name))
        for name, part in slices.items()
    }


def _open_index(opener: Callable[[Path], dict[str, Stored]], index: Path) -> dict[str, Stored]:
    """Opens the tensors of all shards that an index names.

    Raises:
      UserError: a shard and the index disagree.
    """
    places, tensors = _shards_of(index), dict[str, Stored]()
    for shard in dict.fromkeys(places.values()):
        file = index.with_name(shard)
        listed = {name for name, place in places.items() if place == shard}
        if look(file) != "file":
            raise UserError(
                f"{index}: weight_map",
                found=f"{shard}, which does not exist",
                expected=f"a file with the tensor {min(listed)}",
                hint=f"the index lists {len(listed)} tensors in this file",
            )
        require_own(file)
        stored = opener(file)
        for name in sorted(stored.keys() ^ listed):
            problem = "found, but not" if name in stored else "missing; expected it, since it is"
            raise UserError(f"{file}: {name}", f"{problem} listed for this file in {index.name}")
        tensors |= stored
    return tensors


def _shards_of(index: Path) -> dict[str, str]:
    """Returns the shard of each tensor by name, from an index.

    Raises:
      UserError: the index is invalid, or names a file outside of its directory.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise UserError(
            f"{index}: weight_map", found=f"{reprlib.repr(places):.60}", expected="the file name of every tensor"
        )
    for shard in dict.fromkeys(places.values()):
        if shard in ("", ".", "..") or os.path.basename(shard) != shard or not shard.isprintable():
            raise UserError(
                f"{index}: weight_map", found=f"{shard!r:.60}", expected="a file name in the directory of the index"
            )
    return places


def _open_by(format_name: str, file: Path) -> dict[str, Stored]:
    """Opens a file in one of the formats of `registry.WEIGHT_FORMATS`."""
    tensors: dict[str, Stored] = registry.find(registry.WEIGHT_FORMATS[format_name])(file)
    return tensors


_open_torch = partial(_open_by, "torch")
Openers = Mapping[str, Callable[[Path], dict[str, Stored]]]
WHOLE: Openers = {  # the weights of a model
    "model.safetensors": _open_safetensors,
    "model.safetensors.index.json": partial(_open_index, _open_safetensors),
    "pytorch_model.bin": _open_torch,
    "pytorch_model.bin.index.json": partial(_open_index, _open_torch),
    "flax_model.msgpack": partial(_open_by, "flax"),
}
ADAPTER: Openers = {"adapter_model.safetensors": _open_safetensors, "adapter_model.bin": _open_torch}


QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # keys in config.json; the second is an older name
QUANTIZATION_FILES = (
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
)  # files of GPTQ, AWQ and ModelOpt


def find_quantization(directory: Path) -> str:
    """Returns the place of the sign that the weights in a directory are quantised; "" if there is no sign.

    If the sign is in config.json, the method of the quantisation follows the place.
    """
    for place, value in _quantization_settings(directory / "config.json"):
        if isinstance(value, dict):
            of_bits = any(key.startswith(("load_in_", "bnb_")) for key in value)
            method = value.get("quant_method") or ("bitsandbytes" if of_bits else "a method without a name")
        else:
            method = value
        return f"{place} ({method!r:.40})"
    return next((name for name in QUANTIZATION_FILES if look(directory / name) == "file"), "")


def _quantization_settings(file: Path) -> Iterator[tuple[str, object]]:
    """Yields the quantisation settings in config.json with their keys: of the model, and of its parts."""
    parts: list[tuple[str, object]] = [("", read_json(file))]
    for prefix, part in parts:
        if not isinstance(part, dict):
            continue
        yield from ((f"{file.name}: {prefix}{key}", part[key]) for key in QUANTIZATION_KEYS if part.get(key))
        parts += [(f"{prefix}{key}.", part.get(key)) for key in ("encoder", "decoder", "text_config") if part.get(key)]
