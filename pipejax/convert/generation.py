"""The settings of transformers' `generate`: generation_config.json, or config.json without that file.

If a directory has generation_config.json, transformers takes the special ids from it alone. `generate` decodes greedily
unless a setting changes that.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipejax import methods
from pipejax.config import Config, DecodeConfig, check
from pipejax.convert.tensor_files import read_json
from pipejax.model.backbone import Backbone
from pipejax.system.errors import UserError
from pipejax.system.files import look
from pipejax.system.strict_json import JsonObject

FILE = "generation_config.json"
IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
TOP_K = 50  # the default of `generate` for sampling
# These settings change an answer and have no equivalent here: ALWAYS in every case, OF_DRAWS if `generate` samples, and
# OF_BEAMS if it has beams.
ALWAYS = (
    *("min_length", "min_new_tokens", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
    *("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "sequence_bias", "exponential_decay_length_penalty", "guidance_scale", "stop_strings"),
    *("max_time", "num_return_sequences", "watermarking_config", "penalty_alpha", "dola_layers", "constraints"),
    "force_words_ids",
)
OF_DRAWS = ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
OF_RULES = ("repetition_penalty", "no_repeat_ngram_size")
OF_BEAMS = ("early_stopping", "num_beam_groups", "diversity_penalty", *OF_RULES)
FACTORS = (  # settings for which 1 changes nothing
    *("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "typical_p"),
    *("min_length", "num_return_sequences", "num_beam_groups"),
)


@dataclass(frozen=True)
class Generation:
    """The settings of `generate` in a directory."""

    file: Path  # the file that contains them
    values: Mapping[str, object]  # the settings by key, without null values

    @property
    def drawn(self) -> bool:
        """Whether `generate` samples."""
        return self.values.get("do_sample") is True

    @property
    def beams(self) -> object:
        """The number of beams; 1: no beam search."""
        return self.values.get("num_beams", 1)

    def followed(self) -> dict[str, tuple[str, object]]:
        """Returns the settings that have an equivalent: by key, the equivalent key of `decode` and the value for it."""
        values, found = self.values, dict[str, tuple[str, object]]()
        if "max_new_tokens" in values:
            found["max_new_tokens"] = "max_length", values["max_new_tokens"]
        elif "max_length" in values:  # this number includes the start token
            most = values["max_length"]
            found["max_length"] = "max_length", most - 1 if type(most) is int else most
        if self.beams == 1:
            found |= {key: (key, values[key]) for key in OF_RULES if key in values}
        if self.drawn and self.beams == 1:
            found["do_sample"] = "temperature", values.get("temperature", 1.0)
            found |= {"top_k": ("top_k", values.get("top_k", TOP_K)), "top_p": ("top_p", values.get("top_p", 1.0))}
            found["min_p"] = "min_p", values.get("min_p", 0.0)
        elif self.beams != 1 and not self.drawn:
            found |= {"num_beams": ("beams", self.beams)}
            found |= {"length_penalty": ("length_penalty", values.get("length_penalty", 1.0))}
        return found

    def lost(self) -> Iterator[str]:
        """Yields the keys of settings that change answers and have no equivalent here."""
        keys = [*ALWAYS, *(OF_DRAWS if self.drawn else ()), *(OF_BEAMS if self.beams != 1 else ())]
        for key in keys:
            value = self.values.get(key)
            nothing = value is None or (value in (0, [], {}, "") and not key.endswith("_id"))
            if not nothing and not (value == 1 and key in FACTORS):
                yield key
        if self.drawn and self.beams != 1:
            yield from ("do_sample", "num_beams")


def read_generation(directory: Path, facts: Mapping[str, object]) -> Generation:
    """Reads the settings of a directory whose config.json contains `facts`.

    Raises:
      UserError: the file is not JSON.
    """
    file = directory / FILE
    found = look(file) == "file"
    values = read_json(file) if found else facts
    return Generation(
        file if found else directory / "config.json", {key: x for key, x in values.items() if x is not None}
    )


def special_ids(
    generation: Generation, facts: Mapping[str, object]
) -> tuple[dict[str, tuple[object, Path]], list[str]]:
    """Returns the special ids that `generate` uses, by key and each with its file, and lines for the log.

    The ids of eos are a list. `facts` is the content of config.json.
    """
    config, file, values = generation.file.with_name("config.json"), generation.file, generation.values
    given = {key: values.get(key) for key in IDS}
    if given["decoder_start_token_id"] is None:
        given["decoder_start_token_id"] = values.get("bos_token_id")
    if type(given["pad_token_id"]) is int and given["pad_token_id"] < 0:  # some files write -1 for no id
        given["pad_token_id"] = None
    ids, others, lacking = dict[str, tuple[object, Path]](), [], []
    for key, value in given.items():
        known = facts.get(key)
        read = several if key == "eos_token_id" else only
        if value is not None:
            ids[key] = read(value, f"{file}: {key}"), file
            if known is not None and known not in (value, [value]) and [known] != value:
                others.append(f"{key} {value!s:.20} (config.json: {known!s:.20})")
        elif known is not None:
            ids[key] = read(known, f"{config}: {key}"), config
            if file != config and key != "pad_token_id":  # the padding id has no effect on answers in either library
                lacking.append(f"{key} {known}")
    lines = [f"{file}: takes precedence over config.json, as in transformers: {', '.join(others)}"] if others else []
    if lacking:
        lines.append(
            f"{file}: lacks {', '.join(lacking)}, read from config.json instead; transformers' generate would fail "
            "without a start token, and not end without an eos"
        )
    return ids, lines


def decoding(generation: Generation, model: Backbone) -> tuple[DecodeConfig, list[str]]:
    """Returns the `decode` settings that are equivalent to the directory's settings of `generate`, and log lines.

    The lines name the converted settings, and the settings that have no equivalent.
    """
    decode, lost = DecodeConfig(), [*generation.lost()]
    for key, (ours, value) in generation.followed().items():
        setting: JsonObject = {ours: value}
        if type(value) is int and isinstance(getattr(decode, ours), float):
            setting[ours] = float(value)
        try:
            changed = replace(decode, **setting)
            check(Config(model=model, decode=changed), where="")
        except UserError:  # the value is outside the limits here
            lost.append(key)
        else:
            decode = changed
    if generation.drawn and not decode.temperature:  # truncation of the distribution has no effect without sampling
        lost += [key for key in ("top_k", "top_p", "min_p") if key in generation.values and "do_sample" in lost]
        decode = replace(decode, top_k=DecodeConfig.top_k, top_p=DecodeConfig.top_p, min_p=DecodeConfig.min_p)
    file, lines = generation.file, []
    if taken := [f"decode.{key}={x}" for key, x in vars(decode).items() if x != getattr(DecodeConfig, key)]:
        lines.append(f"{file}: used as {', '.join(taken)}")
    if lost:
        named = (f"{key}={json.dumps(generation.values.get(key))[:40]}" for key in lost)
        lines.append(f"{file}: ignored settings, which pipejax does not support: {', '.join(named)}")
    return decode, lines


def of_model(model: Backbone) -> dict[str, object]:
    """Returns the content of generation_config.json for an architecture without a run."""
    values = dict[str, object]((key, getattr(model, key)) for key in IDS) | {"eos_token_id": model.eos_fact}
    # transformers' `generate` makes a cache of `num_layers` layers, which is too small for a deeper decoder.
    return values | ({"use_cache": False} if model.num_decoder_layers > model.num_layers else {})


def of_run(config: Config) -> dict[str, object]:
    """Returns the content of generation_config.json for a run: the closest equivalent that `generate` has."""
    assert config.model is not None
    decode, values = config.decode, of_model(config.model)
    # For a method that writes rows, `generate` alone would write only the first row.
    if "generate" not in methods.trained(config).can:
        return values | ({"max_new_tokens": config.grid.time_max} if config.method is None else {})
    values |= {"max_new_tokens": decode.max_length}
    if decode.beams > 1:
        values |= {"num_beams": decode.beams, "length_penalty": decode.length_penalty}
    elif decode.temperature > 0:
        values |= {"do_sample": True, "temperature": decode.temperature, "top_k": decode.top_k, "top_p": decode.top_p}
        values |= {"min_p": decode.min_p} if decode.min_p else {}
    return values | {
        key: getattr(decode, key) for key in OF_RULES if getattr(decode, key) != getattr(DecodeConfig, key)
    }


def only(value: object, where: str) -> object:
    """Returns the id, or the single id of a list.

    Raises:
      UserError: the value is an empty list, or a list of several ids.
    """
    found = value if isinstance(value, list) else [value]
    if len(found) != 1:
        raise UserError(where, found=f"{value!s:.60}", expected="a single id")
    return found[0]


def several(value: object, where: str) -> list[object]:
    """Returns the ids of a list without duplicates, or the single id as a list.

    Raises:
      UserError: the value is an empty list.
    """
    if isinstance(value, list) and not value:
        raise UserError(where, found="an empty list", expected="at least one id")
    found = value if isinstance(value, list) else [value]
    return [x for i, x in enumerate(found) if (type(x), x) not in ((type(y), y) for y in found[:i])]
