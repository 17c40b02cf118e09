"""From a checkpoint to a `Generator`."""

import logging
from collections.abc import Sequence
from pathlib import Path

from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.checkpoint.fingerprint import digest
from pipejax.config import Config
from pipejax.inference import backends
from pipejax.inference.backends import XLA
from pipejax.inference.generator import Generator, dtype_of
from pipejax.system import compile_cache
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)

# What `--set` may change when a checkpoint is decoded: sections and keys.
DECODING_KEYS = ("grid", "decode", "data.max_source", "data.separator", "data.csv_delimiter")


def load(path: str | Path, *, best: bool = False, overrides: Sequence[str] = ()) -> Generator:
    """What `pipejax.load` calls; arguments and errors are described there.

    Compiled programs are kept as the commands keep them (`pipejax.system.compile_cache`).
    """
    for assignment in overrides:
        key = assignment.partition("=")[0].strip()
        section = key.partition(".")[0]
        if hasattr(Config(), section) and not {section, key} & {*DECODING_KEYS}:
            raise UserError(
                f"--set {assignment}: {key} cannot change when a checkpoint is decoded; expected one of "
                f"{', '.join(DECODING_KEYS)}"
            )
    compile_cache.use()
    restored = checkpoint.open_run(path, best=best, packed=True)
    config = config_lib.override(restored.config, overrides)
    if restored.config.train.objective == "pipelined":
        for key in ("delay", "row_names"):
            trained, wanted = getattr(restored.config.grid, key), getattr(config.grid, key)
            if trained != wanted:
                logger.warning(
                    f"grid.{key}: found {wanted!r}, but these weights were trained with {trained!r}; "
                    "what pipelined decoding writes means little"
                )
    tokenizer = checkpoint.tokenizer_of(restored)
    backend = backends.fastest(config.model, dtype_of(config), config.decode.weights) if config.model else XLA
    generator = Generator(config, restored.items["params"], tokenizer, backend=backend)
    generator.origin = {"step": restored.step, "params_fp": digest(restored.arrays["params"])}
    return generator
