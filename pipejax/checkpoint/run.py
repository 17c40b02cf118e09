"""Opens run directories to use their weights, and writes run directories that contain only weights."""

import dataclasses
import functools
import logging
import shutil
from pathlib import Path

import jax

from pipejax import config as config_lib
from pipejax.checkpoint.arrays import check_place
from pipejax.checkpoint.fingerprint import digest
from pipejax.checkpoint.store import Restored, Store
from pipejax.config import Config
from pipejax.data.tokenizer import Tokenizer, check_special_ids, source_affixes
from pipejax.model import lora, quantization
from pipejax.model.auxiliary import ITEM
from pipejax.system import Tree
from pipejax.system.errors import UserError
from pipejax.system.files import absolute, look, new_directory, write_text

logger = logging.getLogger(__name__)

# The version of the conversion, increased whenever the same files are converted to other numbers. Checkpoints of the
# first version do not contain this number; `Backbone.earlier_doubts` names settings that the first version may have
# read wrongly.
CONVERSION = 2
_warn_once = functools.cache(logger.warning)


def open_run(directory: str | Path, *, best: bool = False, packed: bool = False, apart: bool = False) -> Restored:
    """Reads the parameters of the newest intact step or of the best step; merges low-rank factors into their matrices.

    The result's `arrays` are the fingerprints of the arrays on disk, before merging and conversion to float32.

    Args:
      directory: a run directory or a converted checkpoint.
      best: read the step of the best evaluation instead of the newest step.
      packed: keep weights saved in bfloat16, or in int8 with scales, in that form; if not, all parameters are float32.
      apart: keep low-rank factors separate from their matrices.

    Raises:
      UserError: the directory is not a run directory, or none of its steps is intact.
    """
    directory = Path(directory)
    kind = "best" if best else "checkpoints"
    if (found := look(directory)) == "file":
        raise UserError(directory, found="a file", expected="the directory of a checkpoint or a run")
    if found != "directory":
        hint = "" if directory.parent.is_dir() else ("pipejax convert from-hf downloads a model from the hub")
        raise UserError(directory, "no such checkpoint directory", hint=hint)
    if look(directory / kind) != "directory":
        if best and (directory / "checkpoints").is_dir():
            raise UserError(directory, found="no best/", expected="a run that was evaluated at least once")
        hint = (
            "convert it first: pipejax convert from-hf"
            if any(map(look, (directory / "config.json", directory / "adapter_config.json")))
            else ""
        )
        for above in absolute(directory).parents[:2]:
            if (above / "checkpoints").is_dir() and (above / "config.json").is_file():
                hint = f"it is part of {above}: pass that directory, and --best for its best step"
        raise UserError(directory, found=f"no {kind}/", expected="a checkpoint or run directory", hint=hint)
    restored = Store(directory / kind).newest(None)
    if restored is None:
        hint = "--best selects the best step" if not best and (directory / "best").is_dir() else ""
        raise UserError(directory / kind, found="no intact step", expected="at least one", hint=hint)
    if restored.config.model is None:
        raise UserError(restored.path, found="a config without a model", expected="the architecture of the model")
    if restored.config.auxiliary is not None and ITEM not in restored.items:
        expected = "the auxiliary parameters that the config describes"
        raise UserError(restored.path, found=f"no {ITEM}", expected=expected)
    report_conversion(restored)
    params = restored.items["params"] if packed else quantization.dequantize(restored.items["params"])
    own = {name: tree for name, tree in restored.items.items() if name != "params"}
    return dataclasses.replace(restored, items={"params": params if apart else lora.merge_factors(params), **own})


def open_auxiliary(directory: str | Path, fingerprint: str) -> Tree:
    """Reads the auxiliary parameters of a run.

    Args:
      directory: the run directory.
      fingerprint: the `params_fp` of the model with which the parameters are used; "": nothing is compared.

    Raises:
      UserError: the run cannot be read, has no auxiliary parameters, or trained these parameters for another model.
    """
    restored = open_run(directory, packed=True)
    if ITEM not in restored.items:
        raise UserError(directory, found="no auxiliary parameters", expected="a run with train.freeze = backbone")
    check_beside(str(directory), digest(restored.arrays["params"]), fingerprint)
    return restored.items[ITEM]


def check_beside(where: str, trained: str, fingerprint: str) -> None:
    """Raises a UserError if auxiliary parameters were trained for another model.

    Args:
      where: the place of the parameters, for the message.
      trained: the `params_fp` of the model for which the parameters were trained.
      fingerprint: the `params_fp` of the model with which the parameters are used; "": unknown and not compared.
    """
    if fingerprint and trained != fingerprint:
        raise UserError(
            where,
            found=f"auxiliary parameters that were trained for the model with params_fp = {trained}",
            expected=f"{fingerprint}, the params_fp of the model with which they are used",
        )


def report_conversion(restored: Restored) -> None:
    """Warns once about weights that an earlier release may have converted with other settings than transformers."""
    model, metadata, place = restored.config.model, restored.metadata, restored.path.parents[1]
    trained = restored.config.train.method != "none"
    if model is None or "conversion" in metadata or (trained and not metadata.get("init")):
        return
    if not (doubts := model.earlier_doubts()):
        return
    if trained:
        line = f"{place}: was trained from an earlier version's conversion, with {doubts}; it keeps these settings"
    else:
        line = (
            f"{place}: an earlier version converted it, with {doubts}; pipejax convert from-hf SOURCE NEW converts it "
            "again"
        )
    _warn_once(line)


def tokenizer_of(restored: Restored) -> Tokenizer | None:
    """Returns the tokenizer of an opened run, or None if the run has no tokenizer.

    Raises:
      UserError: the tokenizer's files changed after the step was saved.
    """
    if (files := restored.tokenizer_files()) is None:
        return None
    tokenizer, model, place = Tokenizer.load(files), restored.config.model, restored.path.parents[1]
    if model is None:
        return tokenizer
    trained = restored.config.train.method != "none"
    check_special_ids(tokenizer, model, f"{place}: model.eos_token_id", str(files), trained=trained)
    if restored.is_former and (former := source_affixes(tokenizer, model, "eos")) != tokenizer.affixes:
        now, why = tokenizer.affixes, f"as in transformers; an earlier version of pipejax added {former}"
        if trained:
            now, why = former, f"as in its training; transformers adds {tokenizer.affixes}"
        logger.warning(f"{place}: sources are encoded with {now}, {why}")
    return tokenizer


def save_params(
    directory: str | Path,
    config: Config,
    params: Tree,
    *,
    tokenizer_source: Path | None = None,
    conversion: int | None = CONVERSION,
    auxiliary: Tree = None,
) -> None:
    """Writes a run directory with parameters as step 0 and with tokenizer files, completely or not at all.

    Args:
      directory: absent or empty.
      config: the config with the architecture.
      params: the parameters.
      tokenizer_source: the directory of the tokenizer's files; None: no tokenizer.
      conversion: the version of the conversion of the parameters; None: unknown.
      auxiliary: the auxiliary parameters, if the config has some.

    Raises:
      UserError: the directory is not empty, or cannot be written.
    """
    metadata = {} if conversion is None else {"conversion": conversion}
    directory = absolute(directory)
    check_place(directory)
    require_free(directory)
    try:
        with new_directory(directory) as partial:
            # Copied before the step is saved, because the manifest has the tokenizer's digests.
            if tokenizer_source is not None:
                shutil.copytree(tokenizer_source, partial / "tokenizer")
            store = Store(partial / "checkpoints", writable=True)
            items = {"params": params} | ({} if auxiliary is None else {ITEM: auxiliary})
            items = jax.tree.map(jax.numpy.asarray, items)
            saved = store.save(0, items, config=config, metadata=metadata, wait=True)
            store.close()
            if not saved:
                raise UserError(directory, f"cannot be written ({store.why_not})")
            write_text(partial / "config.json", config_lib.to_json(config))
    except OSError as error:
        reason = error.strerror or str(error)
        # A shutil.Error lists source, target and reason of each file; the source may be a temporary copy.
        if isinstance(error, shutil.Error):
            reason = str(error.args[0][0][2]).partition(": ")[0]
        raise UserError(directory, f"cannot be written ({reason})") from error


def require_free(directory: Path) -> None:
    """Raises a UserError unless the path is absent or an empty directory, so that nothing is overwritten."""
    if look(directory) and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(
            directory, found="an existing file or a directory with files", expected="a new or empty directory"
        )
