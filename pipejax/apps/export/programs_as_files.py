"""Writes a checkpoint's decoding as files that JAX alone runs: programs and weights.

There is a program for each method and platform: the encoder and the whole decoding loop, with XLA's matrix products.
The weights are arguments of the programs and are stored once, in a separate file. As constants they would be part of
every program, and a program of T5-Large would exceed the 2 GB that a FlatBuffers file can hold.

Shapes: B batch, L source length.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax import export as jax_export

from pipejax import checkpoint, decoding, methods
from pipejax import config as config_lib
from pipejax.checkpoint import Restored
from pipejax.checkpoint.fingerprint import digest
from pipejax.config import Config
from pipejax.data.tokenizer import Tokenizer, source_affixes
from pipejax.decoding import TRUNCATIONS, Carry, DecodingOptions, Segment, SourceIds, Strategy, drafters
from pipejax.inference import programs
from pipejax.inference.backends import Backend, Ready, call_costs, portable
from pipejax.inference.decoding_options import forced_of, row_prefix_ids
from pipejax.inference.loading import override
from pipejax.inference.sources import Source, template_of
from pipejax.methods import Ids
from pipejax.model.backbone import Module
from pipejax.model.precision import compute_dtype, precision
from pipejax.model.sharding import path_of
from pipejax.system import Tree
from pipejax.system.errors import UserError
from pipejax.system.extras import extra
from pipejax.system.files import absolute, new_directory

logger = logging.getLogger(__name__)
Unpacked = Callable[[Sequence[jax.Array]], Ready]  # makes the weights from the arrays of a file

WEIGHTS, DESCRIPTION = "weights.npz", "export.json"
COMPATIBILITY = {  # promises of JAX about loading a program with another version than it was exported with
    "newer_at_most": "6 months",
    "older_at_most": "3 weeks",
    "said_in": "https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees",
}


def export(
    directory: str | Path,
    out: str | Path,
    *,
    platforms: Sequence[str],
    names: Sequence[str] = (),
    batch: int | None = None,
    length: int | None = None,
    best: bool = False,
    overrides: Sequence[str] = (),
) -> None:
    """Writes the programs, the weights, a description and the tokenizer's files: completely or not at all.

    Args:
      directory: the run directory.
      out: the directory to write.
      platforms: such as "cpu" and "cuda".
      names: the names of the methods; empty: the method of the training.
      batch: B; None: `decode.batch_size`.
      length: L; None: `data.max_source`.
      best: use the step of the best evaluation instead of the newest one.
      overrides: settings KEY=VALUE, each of which declares the command "export".

    Raises:
      UserError: a setting or method cannot be exported, or the directory cannot be written.
    """
    config_lib.check_taken(overrides, "export")
    out = absolute(out)
    checkpoint.require_free(out)
    with extra("export", "export"):
        import flatbuffers  # noqa: F401  # JAX serialises programs with it
    restored = checkpoint.open_run(directory, best=best)
    config = override(restored.config, overrides, where="--set")
    drafter = None if config.decode.draft == "none" else drafters.make(config.decode.draft)
    if getattr(drafter, "wants", ()) or hasattr(drafter, "read"):
        expected = "another drafter, because an export contains only the model"
        raise UserError("decode.draft", found=config.decode.draft, expected=expected)
    for field in dataclasses.fields(config.decode):
        found = getattr(config.decode, field.name)
        if not field.metadata.get("exported") and found != field.default:
            raise UserError(
                f"decode.{field.name}",
                found=f"{found}",
                expected=f"{'none' if field.default == '' else field.default}, the only value that an export supports",
            )
    batch, length = batch or config.decode.batch_size, length or config.data.max_source
    used = {name: methods.make(name, config) for name in names or (methods.default(config),)}
    for name, method in used.items():
        method.require("export")
        for line in methods.training_mismatches(name, config, restored.config):
            logger.warning(line)
    made = {f"{name}-{platform}.jax": (name, platform) for name in used for platform in platforms}
    model, backend, ready = _prepare(config, restored.items["params"], platforms)
    ids, costs = Ids.of(model.config), call_costs(ready.decoding)
    plain = {name: methods.make_strategy(method, config.decode, ids) for name, method in used.items()}
    tokenizer, spells = restored.tokenizer_files(), checkpoint.tokenizer_of(restored)
    given = {name: row_prefix_ids(Source("any", ""), method, spells, ids.ends) for name, method in used.items()}
    forced = {name: forced_of(given[name], strategy) for name, strategy in plain.items()}
    chosen = dict[str, Strategy]()
    for file, (name, platform) in made.items():
        columns = decoding.columns_for(_options(forced[name], batch), plain[name], platform)
        strategy = decoding.with_forced(plain[name], columns)
        chosen[file] = strategy.tuned_for(platform, costs=costs, skips_fillers=False)
    stored, unpacked = _store(ready)
    weights = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored.values()]
    arguments = weights, jax.ShapeDtypeStruct((batch, length), np.int32), jax.ShapeDtypeStruct((batch,), np.int32)
    with new_directory(out) as partial_out:
        described = {}
        for file, (name, platform) in made.items():
            logger.info(f"tracing the {name} program for {platform}")
            program = jax.jit(partial(_decode, model, backend, chosen[file], platform, unpacked, forced[name]))
            with precision(model.dtype):
                exported = jax_export.export(program, platforms=[platform])(*arguments)
            (partial_out / file).write_bytes(exported.serialize())
            outputs = jax.tree.unflatten(exported.out_tree, [str(x) for x in exported.out_avals])
            # "strategy" is the former name of the key "method", until the next release.
            described[file] = {"method": name, "strategy": name, "platform": platform, "outputs": outputs}
        # NumPy's files do not support bfloat16, so its bits are stored as uint16.
        bits = {name: x.view(np.uint16) if x.dtype == jax.numpy.bfloat16 else x for name, x in stored.items()}
        np.savez(partial_out / WEIGHTS, allow_pickle=False, **bits)
        facts = _description(config, restored, model, batch, length, spells) | {"programs": described}
        (partial_out / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        if tokenizer:
            shutil.copytree(tokenizer, partial_out / "tokenizer")
    for file in (*made, WEIGHTS):
        print(f"{out / file}: {(out / file).stat().st_size / 1e6:.1f} MB")


def _prepare(config: Config, params: Tree, platforms: Sequence[str]) -> tuple[Module, Backend, Ready]:
    """Returns the module, the backend, and the weights in the layout of the backend."""
    assert config.model is not None
    wanted = "float32" if config.decode.weights == "float32" else config.decode.dtype
    if wanted == "auto":  # "auto" is resolved for the platform that runs the program, not for the exporting one
        wanted = "float32" if "cpu" in platforms else "bfloat16"
    model = config.model.module(dtype=compute_dtype(wanted))

    def compute(function: Callable[..., Tree], tree: Tree, **static: object) -> Tree:
        return jax.jit(function, static_argnames=tuple(static))(tree, **static)

    backend = portable(model, config.decode.weights)
    return model, backend, backend.prepare(model, params, compute=compute)


def _store(ready: Ready) -> tuple[dict[str, np.ndarray], Unpacked]:
    """Returns the arrays by name, and a function that rebuilds the weights from them.

    Each array is stored once, because tables are shared.
    """
    stored: dict[str, np.ndarray] = {}
    known: dict[tuple[object, ...], int] = {}
    places = []
    leaves, structure = jax.tree_util.tree_flatten_with_path(ready)
    for keys, leaf in leaves:
        array = np.asarray(leaf)
        what = array.dtype, array.shape, hashlib.sha256(array.tobytes()).digest()
        if what not in known:
            known[what] = len(stored)
            stored[path_of(keys)] = array
        places.append(known[what])

    def unpacked(arrays: Sequence[jax.Array]) -> Ready:
        found: Ready = jax.tree.unflatten(structure, [arrays[place] for place in places])
        return found

    return stored, unpacked


def _decode(
    model: Module,
    backend: Backend,
    strategy: Strategy,
    platform: str,
    unpacked: Unpacked,
    forced: np.ndarray | None,
    weights: Sequence[jax.Array],
    source: jax.Array,
    length: jax.Array,
) -> dict[str, jax.Array]:
    """Decodes a batch; this function is exported as a program.

    The arguments of the program are the last three: weights, source i32 [B, L] and length i32 [B]. The other arguments
    of the function are static.
    """
    ready = unpacked(weights)
    memory = programs.encode_batch(model, ready.encoding, source, length, backend=backend)
    sizes = programs.schedule(strategy, len(source), platform)
    read = None
    if strategy.reads_source:
        read = SourceIds(jax.numpy.pad(source, ((0, 0), (0, memory.mask.shape[1] - source.shape[1]))), length)

    options = _options(forced, len(source))

    def decode_segment(slots: int, carry: Carry | None) -> Segment:
        given = (ready.decoding, None), memory, carry, read, options
        return programs.decode_batch(model, strategy, *given, sizes=sizes, slots=slots, backend=backend)

    decoded = decoding.run_in_one_program(decode_segment, sizes)
    return {name: getattr(decoded, name) for name in ("tokens", "lengths", "steps", "truncated")}


def _options(forced: np.ndarray | None, batch: int) -> DecodingOptions:
    """Returns the options of a batch whose examples have the same forced tokens, i32 [R, W]."""
    return DecodingOptions(forced=None if forced is None else np.repeat(forced[None], batch, axis=0))


def _description(
    config: Config, restored: Restored, model: Module, batch: int, length: int, tokenizer: Tokenizer | None
) -> dict[str, object]:
    """Returns the content of export.json: how to call the programs, and how to make texts of ids."""
    architecture, template = model.config, template_of(config)
    affixes = source_affixes(tokenizer, architecture, config.data.special_tokens)
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "loadable_by_a_jax": COMPATIBILITY,
        "checkpoint": {"name": config.name, "step": restored.step, "params_fp": digest(restored.arrays["params"])},
        "weights": WEIGHTS,
        "dtype": str(model.dtype),
        "inputs": {"source": f"int32[{batch},{length}]", "length": f"int32[{batch}]"},
        "truncated": TRUNCATIONS,
        "bos": architecture.decoder_start_token_id,
        "eos": architecture.eos_token_id,
        "source": {"prefix": affixes.prefix, "suffix": affixes.suffix},
        "ends": architecture.end_token_ids,
        "template": template.text,
        "fields": [*dict.fromkeys(template.fields)],
        "separator": config.data.separator,
        "grid": dataclasses.asdict(config.grid),
        "decode": dataclasses.asdict(config.decode),
        **({} if config.method is None else {"method": config_lib.described(config.method)}),
        "architecture": dataclasses.asdict(architecture),
    }
