"""Checkpoints on disk. The only module that knows Orbax.

A run directory, of which a converted checkpoint is one at step 0:

    config.json            the resolved config, for people
    tokenizer/             the tokenizer's files, if there is one
    checkpoints/STEP/      params, state (absent in converted checkpoints) and manifest
    best/STEP/             params and manifest of the best evaluation
    metrics.jsonl          the log

Orbax checks no content: a flipped bit restores silently. The manifest is committed together with the arrays and holds a
fingerprint of every one, the step (which is the data position, too) and the config, sealed with SHA-256; nothing is
restored that does not match it, and the newest step that does match is used.
"""

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from pipejax import config as config_lib
from pipejax.config import Config
from pipejax.errors import UserError
from pipejax.fingerprint import Fingerprints, difference, fingerprints
from pipejax.sharding import path_of

FORMAT = 1
PASSING = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EINTR)
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint")
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax narrates every save


Expect = Callable[[Config], Mapping[str, Any]]


class Damaged(Exception):
    """A step that must not be used; the message says what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified step."""

    step: int
    items: dict[str, Any]
    config: Config
    metadata: dict[str, Any]
    path: Path


class Store:
    """The steps in one directory."""

    def __init__(self, directory: Path, *, keep: int | None = None, writable: bool = False) -> None:
        self.directory = directory.absolute()
        handlers: dict[str, ocp.CheckpointHandler] = {
            "params": ocp.StandardCheckpointHandler(),
            "state": ocp.StandardCheckpointHandler(),
            "manifest": ocp.JsonCheckpointHandler(),
        }
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=writable,
            read_only=not writable,
            cleanup_tmp_directories=writable,
            enable_async_checkpointing=False,  # a save is on disk before the step's buffers are used again
            should_save_fn=lambda step, latest: True,
        )
        self.manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        """Committed steps, newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def save(self, step: int, items: Mapping[str, Any], *, config: Config, metadata: Mapping[str, Any]) -> None:
        """Commits arrays and manifest as one; a step of that number from a lost stretch of training is replaced."""
        if step in self.steps():
            self.manager.delete(step)
        arrays = {name: fingerprints(tree) for name, tree in items.items()}
        manifest = _seal(
            {
                "format": FORMAT,
                "step": step,
                "arrays": arrays,
                "metadata": dict(metadata),
                "config": json.loads(config_lib.to_json(config)),
                "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            }
        )
        saves = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        done = self.manager.save(
            step, args=ocp.args.Composite(**saves, manifest=ocp.args.JsonSave(manifest)), force=True
        )
        if not done:
            raise RuntimeError(f"{self.directory}: step {step} was not saved")

    def restore(self, step: int, expect: Expect | None = None) -> Restored:
        """Reads one step and verifies it.

        Args:
          step: a committed step.
          expect: gives, for the step's config, trees of jax.ShapeDtypeStruct with shardings for each item wanted; None:
            the parameters alone, on the first device.

        Raises:
          Damaged: anything is absent, unreadable or does not match the manifest.
        """
        manifest = self._manifest(step)
        config = config_lib.from_json(json.dumps(manifest["config"]), where=f"{self.directory / str(step)} (manifest)")
        templates = expect(config) if expect else {"params": _template(manifest["arrays"]["params"])}
        for name, template in templates.items():
            expected = manifest["arrays"].get(name)
            if expected is None:
                raise Damaged(f"holds no {name}")
            if problem := _shape_difference(template, expected):  # the manifest is sealed: nothing is damaged
                raise UserError(
                    f"{self.directory / str(step)}: {name}: {problem}; expected what this program would save "
                    f"(it was saved with {', '.join(f'{k} {v}' for k, v in manifest['versions'].items())})"
                )
        try:
            wanted = {name: ocp.args.StandardRestore(template) for name, template in templates.items()}
            restored = self.manager.restore(step, args=ocp.args.Composite(**wanted))
        except Exception as error:
            _refuse_passing_trouble(error, self.directory / str(step))
            _hush_stragglers()
            raise Damaged(f"unreadable ({type(error).__name__}: {_brief(error)})") from error
        items = {name: restored[name] for name in templates}
        for name, tree in items.items():
            if problem := difference(fingerprints(tree), manifest["arrays"][name]):
                raise Damaged(f"{name}: {problem}")
        return Restored(step, items, config, manifest["metadata"], self.directory / str(step))

    def newest(self, expect: Expect | None, *, log: Callable[[str], None], set_aside: bool = False) -> Restored | None:
        """The newest step that verifies, or None. With `set_aside` damaged ones are renamed to corrupt-STEP."""
        for step in self.steps():
            try:
                return self.restore(step, expect)
            except Damaged as damage:
                path = self.directory / str(step)
                action = "skipped"
                if set_aside:
                    action = f"kept aside as {_set_aside(path).name}"
                    self.manager.reload()
                log(f"{path}: damaged, {damage}; {action}")
        return None

    def _manifest(self, step: int) -> dict[str, Any]:
        try:
            args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
            manifest = self.manager.restore(step, args=args)["manifest"]
        except Exception as error:
            _refuse_passing_trouble(error, self.directory / str(step))
            raise Damaged(f"manifest unreadable ({type(error).__name__}: {_brief(error)})") from error
        if not isinstance(manifest, dict) or manifest != _seal(manifest):
            raise Damaged("manifest does not match its seal")
        if manifest["format"] != FORMAT:
            raise UserError(f"{self.directory / str(step)}: found format {manifest['format']}; expected {FORMAT}")
        if manifest["step"] != step:
            raise Damaged(f"manifest is of step {manifest['step']}")
        return manifest

    def close(self) -> None:
        """Frees the manager's threads."""
        self.manager.close()


def open_run(directory: str | Path, *, best: bool = False, log: Callable[[str], None] = print) -> Restored:
    """The newest good step of a run directory, parameters only.

    Raises:
      UserError: the directory is none, or none of its steps is good.
    """
    directory = Path(directory)
    kind = "best" if best else "checkpoints"
    if not directory.is_dir():
        raise UserError(f"{directory}: no such checkpoint directory")
    if not (directory / kind).is_dir():
        if best and (directory / "checkpoints").is_dir():
            raise UserError(f"{directory}: found no best/; expected a run that was evaluated at least once")
        hint = "; convert it first: python -m pipejax.convert from-hf" if (directory / "config.json").is_file() else ""
        raise UserError(f"{directory}: found no {kind}/; expected a checkpoint or run directory{hint}")
    store = Store(directory / kind)
    try:
        restored = store.newest(None, log=log)
    finally:
        store.close()
    if restored is None:
        raise UserError(f"{directory / kind}: found no good step; expected at least one")
    return restored


def save_params(directory: str | Path, config: Config, params: Any, *, tokenizer_source: Path | None = None) -> None:
    """Writes a run directory that holds parameters alone, at step 0: whole or not at all.

    Raises:
      UserError: the directory exists and is not empty.
    """
    directory = Path(directory).absolute()
    require_free(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-partial-", dir=directory.parent))
    try:
        partial.chmod(0o755)
        store = Store(partial / "checkpoints", writable=True)
        store.save(0, {"params": jax.tree.map(jax.numpy.asarray, params)}, config=config, metadata={})
        store.close()
        if tokenizer_source is not None:
            shutil.copytree(tokenizer_source, partial / "tokenizer")
        write_text(partial / "config.json", config_lib.to_json(config))
        if directory.is_dir():
            directory.rmdir()
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_free(directory: Path) -> None:
    """Nothing is overwritten: a directory to be written must be absent or empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: found something there; expected a new or an empty directory")


def write_text(path: Path, text: str) -> None:
    """Replaces a file whole, or leaves it as it was."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}-", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _seal(manifest: dict[str, Any]) -> dict[str, Any]:
    body = {key: value for key, value in manifest.items() if key != "seal"}
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return {**body, "seal": hashlib.sha256(text.encode()).hexdigest()}


def _template(arrays: Fingerprints) -> dict[str, Any]:
    """A nested dict of shapes on the first device from paths "a/b/c"."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    tree: dict[str, Any] = {}
    for path, (dtype, shape, *_) in arrays.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
    return tree


def _shape_difference(template: Any, expected: Fingerprints) -> str | None:
    leaves = jax.tree_util.tree_flatten_with_path(template)[0]
    wanted: Fingerprints = {path_of(keys): [str(x.dtype), list(x.shape)] for keys, x in leaves}
    return difference(wanted, {path: entry[:2] for path, entry in expected.items()})


def _set_aside(path: Path) -> Path:
    target, count = path.with_name(f"corrupt-{path.name}"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"corrupt-{path.name}-{count}")
    path.rename(target)
    return target


def _refuse_passing_trouble(error: BaseException, path: Path) -> None:
    """A step that cannot be read just now is not damaged: no older one may take its place.

    Raises:
      UserError: memory, file handles, permission or the device that holds the files failed, not their content.
    """
    cause: BaseException | None = error
    while cause is not None:
        passing = isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in PASSING)
        if passing or "RESOURCE_EXHAUSTED" in str(cause) or "PERMISSION_DENIED" in str(cause):
            raise UserError(f"{path}: cannot be read now ({type(cause).__name__}: {_brief(cause)})") from error
        cause = cause.__cause__ or cause.__context__


def _hush_stragglers() -> None:
    """When one array cannot be read, Orbax abandons its reads of the others, and each dies with a traceback of its own.

    They say nothing that the one line about the damaged step does not. Everything else is passed on as before.
    """
    before = sys.unraisablehook
    if getattr(before, "hushes", False):
        return

    def hook(unraisable: Any) -> None:
        told = f"{unraisable.object!r} {unraisable.exc_value!r} {unraisable.err_msg}"
        if "Event loop is closed" not in told and "_read_array_index" not in told and "TensorStore" not in told:
            before(unraisable)

    hook.hushes = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
