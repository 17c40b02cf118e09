"""Makes a `Generator` from a checkpoint."""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from pipejax import checkpoint, methods
from pipejax import config as config_lib
from pipejax.checkpoint.fingerprint import digest, encoder_digest
from pipejax.config import Config, Overrides
from pipejax.decoding.drafters import TargetModel
from pipejax.inference import drafter_parameters
from pipejax.inference.generator import Generator
from pipejax.inference.settings import WITH_WEIGHTS
from pipejax.methods import Method
from pipejax.model import lora
from pipejax.model.auxiliary import ITEM
from pipejax.system import compile_cache, trials
from pipejax.system.errors import UserError


def load(
    path: str | Path,
    *,
    best: bool = False,
    overrides: Overrides = (),
    where: str = "--set",
    method: Method | str | None = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> Generator:
    """Implements `pipejax.load`, which documents arguments and errors.

    `where` is the origin of the overrides, for messages.
    """
    config_lib.check_taken(overrides, "decode", where=where)
    compile_cache.use_cache()
    place = Path(path)
    if place.is_dir():  # else an error follows at once
        trials.try_kernels_early(trains=False)
    if not (place / ("best" if best else "checkpoints")).is_dir():
        from pipejax.convert import converted  # imported here, because checkpoints open faster without it

        place = converted.find_checkpoint(path)
    restored = checkpoint.open_run(place, best=best, packed=True)
    config = restored.config if method is None else methods.choose(restored.config, method)
    config = override(config, overrides, where=where)
    methods.default(config)  # fails here if a class is missing, not at the first decode
    tokenizer, params = checkpoint.tokenizer_of(restored), restored.items["params"]
    found = {}
    if adapters:
        from pipejax.inference import adapters as reading  # imported here for the same reason

        found = {name: reading.read(directory, restored, tokenizer) for name, directory in adapters.items()}
        params = lora.stack(params, [own.factors for own in found.values()])
    fingerprint = digest(restored.arrays["params"])
    drafter = (
        None
        if config.decode.draft == "none"
        else drafter_parameters.load(
            TargetModel(config, fingerprint, restored.items.get(ITEM), encoder_digest(restored.arrays["params"]))
        )
    )
    generator = Generator(config, params, tokenizer, backend=None, drafter=drafter)
    generator.checkpoint = str(path)
    generator.trained = restored.config
    generator.origin = {"step": restored.step, "params_fp": fingerprint}
    generator.learned = restored.metadata.get("data_whole", "")
    for number, (name, own) in enumerate(found.items(), 1):
        adapted = copy.copy(generator)
        of_base = {key: getattr(config.decode, key) for key in (*WITH_WEIGHTS, "draft")}
        trained = own.trained if method is None else methods.choose(own.trained, method)
        own_config = override(trained, overrides, where=where)
        adapted.config = dataclasses.replace(own_config, decode=dataclasses.replace(own_config.decode, **of_base))
        methods.default(adapted.config)
        adapted.trained, adapted.origin, adapted.adapter = own.trained, own.origin, number
        generator.adapters[name] = adapted
    generator.adapter = 0 if found else None
    return generator


def override(saved: Config, overrides: Overrides, *, where: str) -> Config:
    """Returns the config of a checkpoint with overrides.

    Raises:
      UserError: an override is not allowed, or would change the backbone.
    """
    config = config_lib.override(saved, overrides, where=where)
    if config.model != saved.model:
        found, expected = (config_lib.described(x.model, "model")["class"] for x in (config, saved))
        raise UserError(
            f"{where}: model", found=found, expected=f"{expected}, the class that the checkpoint was trained with"
        )
    return config
