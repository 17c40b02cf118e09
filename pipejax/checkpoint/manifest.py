"""What a step says of itself, sealed: the fingerprint of every array, the data position, the config.

Orbax checks no content: a flipped bit restores silently. The manifest is committed together with the arrays
and sealed with SHA-256; nothing is used that does not match it.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from pipejax import config as config_lib
from pipejax.config import Config
from pipejax.errors import UserError
from pipejax.fingerprint import Fingerprints, difference
from pipejax.sharding import path_of

FORMAT = 1
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint")

Manifest = dict[str, Any]


class Damaged(Exception):
    """A step that must not be used; the message says what is wrong with it."""


def make(step: int, arrays: Mapping[str, Fingerprints], config: Config, metadata: Mapping[str, Any]) -> Manifest:
    """The sealed manifest of a step, which is the data position, too; `arrays` by item."""
    return _seal(
        {
            "format": FORMAT,
            "step": step,
            "arrays": dict(arrays),
            "metadata": dict(metadata),
            "config": json.loads(config_lib.to_json(config)),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        }
    )


def check(manifest: Any, step: int, place: Path) -> Manifest:
    """The manifest, if it is whole and that step's.

    Raises:
      Damaged: it is not.
      UserError: another version of this program wrote it.
    """
    if not isinstance(manifest, dict) or manifest != _seal(manifest):
        raise Damaged("manifest does not match its seal")
    if manifest.get("format") != FORMAT:
        raise UserError(f"{place}: found format {manifest.get('format')}; expected {FORMAT}")
    if manifest["step"] != step:
        raise Damaged(f"manifest is of step {manifest['step']}")
    return manifest


def check_template(name: str, template: Any, manifest: Manifest, place: Path) -> None:
    """The shapes that somebody wants of an item must be those that were saved.

    Raises:
      Damaged: there is no such item.
      UserError: they are not. The manifest is sealed, so nothing is damaged: another program saved it.
    """
    expected = manifest["arrays"].get(name)
    if expected is None:
        raise Damaged(f"holds no {name}")
    leaves = jax.tree_util.tree_flatten_with_path(template)[0]
    wanted: Fingerprints = {path_of(keys): [str(x.dtype), list(x.shape)] for keys, x in leaves}
    if problem := difference(wanted, {path: entry[:2] for path, entry in expected.items()}):
        raise UserError(
            f"{place}: {name}: {problem}; expected what this program would save "
            f"(it was saved with {', '.join(f'{k} {v}' for k, v in manifest['versions'].items())})"
        )


def on_host() -> jax.sharding.Sharding:
    """The host's memory, if JAX may use it: no one accelerator may have room for all of an item."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to do without
        device = jax.local_devices()[0]
    return jax.sharding.SingleDeviceSharding(device)


def template(arrays: Fingerprints) -> dict[str, Any]:
    """A nested dict of shapes on the host, whence what is needed goes to devices, from paths "a/b/c"."""
    sharding = on_host()
    tree: dict[str, Any] = {}
    for path, (dtype, shape, *_) in arrays.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
    return tree


def _seal(manifest: Manifest) -> Manifest:
    body = {key: value for key, value in manifest.items() if key != "seal"}
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return {**body, "seal": hashlib.sha256(text.encode()).hexdigest()}
