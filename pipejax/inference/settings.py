"""Settings of a decode: which ones a call from Python may change, and which ones contradict a model's training."""

import dataclasses
from collections.abc import Mapping

from pipejax import config as config_lib
from pipejax.config import DRAFTS, Config, DecodeConfig, GridConfig
from pipejax.decoding import Drafter, drafters
from pipejax.system.errors import UserError, did_you_mean
from pipejax.system.fields import shown_value
from pipejax.system.strict_json import JsonMapping

# The settings that a call accepts, by their short names, and the settings that only opening the checkpoint can change.
NAMES = {
    field.name: f"{section}.{field.name}"
    for section, settings in (("decode", DecodeConfig), ("grid", GridConfig))
    for field in dataclasses.fields(settings)
}
WITH_WEIGHTS = [name for name, key in NAMES.items() if config_lib.SETTINGS[key].get("with_weights")]


def of_call(
    config: Config, call: str, settings: JsonMapping, *, drafter: Drafter | None, without: Mapping[str, str]
) -> Config:
    """Returns the config with the settings of one call, checked like --set.

    Args:
      config: the generator's config.
      call: the name of the method that is called, for messages.
      settings: values by short name.
      drafter: the drafter of `decode.draft` when the checkpoint was opened.
      without: settings that this call does not accept, with the expected alternative in words.

    Raises:
      UserError: a setting is unknown, invalid or not accepted.
    """
    for name, value in settings.items():
        if name not in NAMES:
            hint = did_you_mean(name, NAMES) or f"the keys are {', '.join(NAMES)}"
            raise UserError(f"{call}()", found=f"the setting {name!r}", expected="a key of decode or grid", hint=hint)
        if name in without:
            raise UserError(f"{call}(): {name}", found=shown_value(value), expected=f"{without[name]}")
        if name in WITH_WEIGHTS or (name == "draft" and _needs_opening(value, drafter)):
            more = ', "decode.draft_checkpoint": DIRECTORY' if name == "draft" else ""
            raise UserError(
                f"{call}(): {name}",
                found=f"{shown_value(value)}, which no call can change",
                expected=f'pipejax.load(path, overrides={{"{NAMES[name]}": {shown_value(value)}{more}}})',
            )
    return config_lib.override(config, {NAMES[name]: value for name, value in settings.items()}, where=f"{call}()")


def _needs_opening(draft: object, drafter: Drafter | None) -> bool:
    """Returns whether a value of `decode.draft` needs parameters that are read only when the checkpoint is opened.

    Args:
      draft: the value. The result is False for an invalid value, which `override` reports.
      drafter: the drafter of `decode.draft` when the checkpoint was opened.
    """
    if not isinstance(draft, str) or draft not in DRAFTS[1:]:
        return False  # `check` in `drafter_parameters` refuses a class of the user
    made = drafters.make(draft)
    return drafters.wants(made, "parameters") and type(made) is not type(drafter)
