"""The manifest of a step: its number, the fingerprint of every array, metadata and the config, sealed with SHA-256.

Orbax does not check content: it restores a flipped bit without an error. So the manifest is committed together with the
arrays, and a step that does not match its manifest is not used.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict, cast

import jax

from pipejax import config as config_lib
from pipejax.checkpoint.fingerprint import Fingerprints, first_difference, shapes_of
from pipejax.config import Config
from pipejax.data.shapes import Shapes
from pipejax.model import parameters, quantization
from pipejax.system import Tree, environment, strict_json
from pipejax.system.errors import UserError

FORMAT = 1
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint")
_ITEM, _PATH = re.compile(r"[a-z_]+"), re.compile(r"[^/]+(/[^/]+)*")
_DTYPE = re.compile(r"bool|u?int(8|16|32)|float(16|32)|bfloat16")


class Metadata(TypedDict, total=False):
    """The known metadata of a step; a manifest may contain other keys as well."""

    # Fingerprints of examples: "data" of the examples trained on, "data_whole" of all training examples if they are in
    # memory, "dev" of the dev split.
    data: str
    data_whole: str
    dev: str
    shapes: dict[str, object]  # the padded shapes, in the format of `Shapes.to_json`
    score: list[float]
    tokenizer: dict[str, str]  # digests of the tokenizer's files, by name
    init: str  # the fingerprint of the weights that the run began with
    conversion: int  # the version of the conversion of these weights, or of the weights that the run began with


class Manifest(TypedDict):
    """The manifest of a step after `check_manifest`; `make_manifest` documents the values."""

    format: int
    step: int
    arrays: dict[str, Fingerprints]
    files: dict[str, str] | None  # None in steps of older releases
    metadata: Metadata
    config: dict[str, object]
    settings: dict[str, bool | int | str | None]
    versions: dict[str, str]
    seal: str


class Damaged(Exception):
    """Raised if a step is damaged and must not be used; the message names the damage."""


def make_manifest(
    step: int,
    arrays: Mapping[str, Fingerprints],
    config: Config,
    metadata: Mapping[str, object],
    files: Mapping[str, str],
) -> Manifest:
    """Returns the sealed manifest of a step.

    Args:
      step: the step's number.
      arrays: the fingerprints, by item and path.
      config: the resolved config.
      metadata: see `Metadata`.
      files: the digests of the items' small files, by ITEM/NAME.
    """
    return cast(
        Manifest,
        _seal(
            {
                "format": FORMAT,
                "step": step,
                "arrays": dict(arrays),
                "files": dict(files),
                "metadata": dict(metadata),
                "config": strict_json.loads(config_lib.to_json(config)),
                "settings": environment.settings(),
                "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            }
        ),
    )


def check_manifest(manifest: object, step: int, place: Path) -> Manifest:
    """Checks the seal, the form and the step of a manifest, and returns the manifest.

    Args:
      manifest: the decoded JSON.
      step: the step that the manifest must belong to.
      place: the step's directory, for messages.

    Raises:
      Damaged: the seal is wrong, or the manifest belongs to another step.
      UserError: the seal is right, but the form of the manifest is unknown, as in steps of other releases, or the
        parameters do not fit the config.
    """
    if not isinstance(manifest, dict) or manifest != _seal(manifest):
        raise Damaged("manifest does not match its seal")
    where = f"{place} (manifest)"
    if manifest.get("format") != FORMAT or not _is_whole_number(manifest["format"]):
        raise UserError(
            f"{where}: format", found=f"{_shown_briefly(manifest.get('format'))}", expected=f"the number {FORMAT}"
        )
    for key, (fits, expected) in _FORM.items():
        if not fits(manifest.get(key)):
            raise UserError(f"{where}: {key}", found=f"{_shown_briefly(manifest.get(key))}", expected=expected)
    found = cast(Manifest, manifest)
    if found["step"] != step:
        raise Damaged(f"manifest belongs to step {found['step']}")
    for item, arrays in found["arrays"].items():
        _check_arrays(f"{where}: arrays.{item}", arrays)
    config = config_of(found, place)
    if config.model is not None:
        params = found["arrays"]["params"].items()
        parameters.check_paths(f"{where}: params", {path: entry[1] for path, entry in params}, config.model)
        quantization.check_scales(f"{where}: params", {path: entry[0] for path, entry in params})
    return found


def config_of(manifest: Manifest, place: Path) -> Config:
    """Returns the config in a manifest; `place` is for messages."""
    return config_lib.from_saved(manifest["config"], where=f"{place} (manifest)")


def _check_arrays(where: str, arrays: object) -> None:
    """Raises a UserError unless the fingerprints of an item have the right form: by path, four values each."""
    if not isinstance(arrays, dict):
        raise UserError(where, found=f"{_shown_briefly(arrays)}", expected="an object")
    for path, entry in arrays.items():
        above = {path[:i] for i, letter in enumerate(path) if letter == "/"}
        if not _PATH.fullmatch(path) or above & arrays.keys():
            raise UserError(
                where, found=f"the path {path!r}", expected="names separated by /, and no array within another"
            )
        good = isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str) and _DTYPE.fullmatch(entry[0])
        if not (good and isinstance(entry[1], list) and all(map(_is_whole_number, [*entry[1], *entry[2:]]))):
            raise UserError(
                f"{where}.{path}",
                found=f"{_shown_briefly(entry)}",
                expected="a list of a dtype, a shape and two whole numbers",
            )


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_shapes(value: object) -> bool:
    with contextlib.suppress(ValueError):
        Shapes.from_json(value)
        return True
    return False


def _is_metadata(value: object) -> bool:
    known: dict[str, Callable[[object], bool]] = {
        "data": lambda data: isinstance(data, str),
        "shapes": _is_shapes,
        "score": lambda score: isinstance(score, list) and score != [] and all(type(x) in (int, float) for x in score),
        "tokenizer": _is_texts,
        "conversion": _is_whole_number,
    }
    return isinstance(value, dict) and all(fits(value[key]) for key, fits in known.items() if key in value)


# For each key of a manifest: a check of the value, and the expected form in words.
_FORM: dict[str, tuple[Callable[[object], bool], str]] = {
    "step": (_is_whole_number, "a whole number"),
    "arrays": (
        lambda value: isinstance(value, dict) and "params" in value and all(map(_ITEM.fullmatch, value)),
        "an object with params",
    ),
    "files": (lambda value: value is None or _is_texts(value), "digests by name, or null as in old manifests"),
    "metadata": (
        _is_metadata,
        "an object; in it data as text, score as a list of numbers, tokenizer as digests by name, shapes as lengths, "
        "conversion as a whole number",
    ),
    "config": (lambda value: isinstance(value, dict), "an object"),
    "versions": (_is_texts, "an object of texts"),
}


def _shown_briefly(value: object) -> str:
    kind = {dict: "an object", list: "a list", str: "the text", bool: "the word", type(None): "nothing"}
    name, text = kind.get(type(value), "the number"), json.dumps(value)
    return name if value is None or len(text) > 60 else f"{name} {text}"


def check_template(name: str, template: Tree, manifest: Manifest, place: Path) -> None:
    """Checks that a step has the arrays of `template` in item `name`, with the same shapes and dtypes."""
    saved = manifest["arrays"].get(name)
    if saved is None:
        raise Damaged(f"has no {name}")
    if problem := first_difference({path: entry[:2] for path, entry in saved.items()}, shapes_of(template)):
        versions = ", ".join(f"{package} {version}" for package, version in manifest["versions"].items())
        raise UserError(
            f"{place}: {name}",
            problem,
            hint=f"this version of pipejax saves other arrays; the step was saved with {versions}",
        )


def on_host() -> jax.sharding.Sharding:
    """Returns a sharding on the host, because an item may be larger than an accelerator's memory.

    If JAX may not use the CPU, the sharding is on the first device.
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        device = jax.local_devices()[0]
    return jax.sharding.SingleDeviceSharding(device)


def template(arrays: Fingerprints) -> Tree:
    """Returns a nested dict of jax.ShapeDtypeStruct on the host, from fingerprints by path "a/b/c"."""
    sharding = on_host()
    tree: Tree = {}
    for path, (dtype, shape, *_) in arrays.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
    return tree


def _seal(manifest: Mapping[str, object]) -> dict[str, object]:
    """Returns the manifest with the SHA-256 of its other values under "seal"."""
    body = {key: value for key, value in manifest.items() if key != "seal"}
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return {**body, "seal": hashlib.sha256(text.encode()).hexdigest()}
