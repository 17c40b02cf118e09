"""Decoding methods. A method is one object that covers all steps from target to text; `method` defines its interface.

A config can name a custom method, as `method=Branching(0.3)` or `method="module:Branching"` (docs/methods.md).
"""

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from pipejax import moved
from pipejax.config import METHODS, Config, DecodeConfig, described, made
from pipejax.methods.method import ABILITIES, Ability, Ids, InTorch, Method, RowPrefixes, Target
from pipejax.methods.method_checks import check_target, ignored_settings, strategy_of
from pipejax.methods.pipelined import NamedRows, PipelinedMethod
from pipejax.methods.sequential import Beams, SequentialMethod, joined_change, split_rows, tells_rows_apart
from pipejax.methods.spelling import Spells, prefix_ids, separator_ids, shown, spell
from pipejax.system.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from pipejax.decoding import Drafter, Strategy

__all__ = [
    "ABILITIES",
    "Ability",
    "Beams",
    "Ids",
    "InTorch",
    "Method",
    "NamedRows",
    "PipelinedMethod",
    "RowPrefixes",
    "SequentialMethod",
    "Spells",
    "Target",
    "check",
    "check_target",
    "check_training",
    "choose",
    "default",
    "ignored_settings",
    "joined_change",
    "make",
    "make_strategy",
    "methods_with",
    "names",
    "prefix_ids",
    "separator_ids",
    "shown",
    "spell",
    "split_rows",
    "strategy_of",
    "tells_rows_apart",
    "trained",
    "training_mismatches",
]

__getattr__ = moved.renamed(
    "pipejax.methods",
    {
        "Given": "RowPrefixes",
        "able": "methods_with",
        "doubts": "training_mismatches",
        "unread": "ignored_settings",
    },
)


def names(config: Config) -> tuple[str, ...]:
    """Returns the names of the methods with which weights of this config can decode.

    These are the built-in methods and `config.method`.
    """
    return (*METHODS, own.name) if (own := _own(config)) else METHODS


def methods_with(config: Config, ability: str) -> dict[str, Method]:
    """Returns the methods of a config that have an ability and are compatible with the config's settings, by name.

    Args:
      config: the config.
      ability: one of ABILITIES.
    """
    found = dict[str, Method]()
    for name in names(config):
        with contextlib.suppress(UserError):
            if ability in (method := make(name, config)).can:
                found[name] = method
    return found


def default(config: Config) -> str:
    """Returns the name of the method for which weights were trained; "sequential" if pipejax has not trained them."""
    if own := _own(config):
        return own.name
    return "sequential" if config.train.method == "none" else config.train.method


def trained(config: Config) -> Method:
    """Returns the method by which a run is trained.

    If the class of the method is not imported, the result is a placeholder with its name, without abilities.
    """
    try:
        if own := _own(config):
            return own
    except UserError:
        if not isinstance(config.method, dict):
            raise
        absent: Method = type("Absent", (Method,), {"name": config.method["class"]})()
        return absent
    return (PipelinedMethod if default(config) == PipelinedMethod.name else SequentialMethod).of(config)


def make(name: str, config: Config) -> Method:
    """Returns the method with this name and the settings of a config.

    Raises:
      UserError: the config has no method with this name, or settings contradict each other.
    """
    _check_name(name, config)
    beams = config.decode.beams
    if beams > 1 and name != SequentialMethod.name:
        raise UserError("decode.beams", found=f"{beams}", expected=f"1, since beam search is sequential, not {name}")
    if (own := _own(config)) and name == own.name:
        return own
    if name == PipelinedMethod.name:
        return PipelinedMethod.of(config)
    plain = SequentialMethod.of(config)
    if beams == 1:
        return plain
    return Beams(plain.max_length, plain.separator, plain.delay, beams, config.decode.length_penalty)


def _check_name(name: str, config: Config) -> None:
    if name not in (known := names(config)):
        raise UserError(
            "method", found=f"{name!r}", expected=f"one of {', '.join(known)}", hint=did_you_mean(name, known)
        )


def choose(config: Config, method: Method | str) -> Config:
    """Returns the config with another default method: an object, or the name of one of the methods of the config.

    Raises:
      UserError: the config has no method with this name.
    """
    if not isinstance(method, str):
        return dataclasses.replace(config, method=method)
    _check_name(method, config)
    if method == default(config):  # weights that pipejax did not train remain marked as such
        return config
    return dataclasses.replace(config, method=None, train=dataclasses.replace(config.train, method=method))


def check(method: Method, decode: DecodeConfig, *, drafts: bool = False) -> None:
    """Raises a UserError if decoding needs an ability that the method lacks, or if settings contradict each other.

    Args:
      method: the method.
      decode: the settings of decoding.
      drafts: whether the caller passes a drafter, which needs the ability "draft".
    """
    if decode.samples > 1 and decode.temperature == 0:
        raise UserError(
            "decode.samples",
            found=f"{decode.samples} with decode.temperature = 0",
            expected="a temperature above 0, since all samples would be the same",
        )
    for field in dataclasses.fields(decode):
        if field.metadata.get("asks") and (found := getattr(decode, field.name)) != field.default:
            method.require(field.metadata["ability"], f"decode.{field.name}", f"{found}", field.default)
    if drafts:
        method.require("draft", "drafter", "a drafter")
    elif decode.trace and decode.draft == "none":
        raise UserError(
            "decode.trace", found="True with decode.draft = none", expected="a drafter, since a trace shows drafts"
        )


def check_training(config: Config) -> None:
    """Raises a UserError unless the method of a run can train it and can decode its evaluations."""
    method = make(default(config), config)
    method.check()  # otherwise only the first decode would raise the error
    check(method, config.decode)


def make_strategy(
    method: Method, decode: DecodeConfig, ids: Ids, drafter: "Drafter | None" = None, *, drafts: bool = True
) -> "Strategy":
    """Returns the decoding strategy of a method.

    Args:
      method: the method.
      decode: the settings of decoding.
      ids: the token ids of the model.
      drafter: the drafter; None: the one named by `decode.draft`.
      drafts: whether the strategy drafts, if there is a drafter.

    Raises:
      UserError: see `check` and `strategy_of`.
    """
    check(method, decode, drafts=drafter is not None)
    made = strategy_of(method, ids)
    if not drafts or (drafter is None and decode.draft == "none"):
        return made
    from pipejax.decoding import drafted

    return drafted(made, decode, drafter)


def training_mismatches(name: str, config: Config, learned: Config) -> list[str]:
    """Returns warnings about differences between decoding and training, since such differences make poor output likely.

    Args:
      name: the name of the method that decodes.
      config: the config of decoding.
      learned: the config with which the weights were trained.

    Returns:
      One line for a method that the weights were not trained for, and one for each setting of `Method.learned` that
      had another value in training.
    """
    method, saved, lines = make(name, config), learned.method, list[str]()
    then = {"class": default(learned)} if saved is None else described(saved)
    if then["class"] != (name if name in METHODS else described(method)["class"]):
        never = saved is None and learned.train.method == "none"
        found = "not trained by pipejax for any method" if never else f"trained with the {then['class']} method"
        lines.append(f"these weights were {found}; {name} decoding will run, but expect poor output")
    before = {f"method.{key}": value for key, value in then.items()} | trained(learned).learned()
    for key, now in method.learned().items():
        if (was := before.get(key, now)) != now:
            line = f"{key}: found {now!r}, but these weights were trained with {was!r}"
            lines.append(f"{line}; expect poor output from {method.label}")
    return lines


def _own(config: Config) -> Method | None:
    """Returns the method object of `config.method`, or None. Raises a UserError if the object is not a valid method."""
    own = made(config.method) if isinstance(config.method, dict) else config.method
    if own is None:
        return None
    if not isinstance(own, Method):
        raise UserError("method", found=f"{own!r}", expected="an object of a subclass of pipejax.Method")
    if own.name in ("", *METHODS):
        raise UserError("method", found=f"{type(own).__name__} with the name {own.name!r}", expected="an unused name")
    return own
