"""Methods of writing an answer, each one object from target to text: `interface` says what it is asked.

A method of one's own comes in a config, as `method=Branching(0.3)` or `method="module:Branching"`.
"""

import contextlib
from typing import TYPE_CHECKING

from pipejax import moved
from pipejax.config import STRATEGIES, Config, DecodeConfig, described, made
from pipejax.methods.method import ABILITIES, Ids, InTorch, Method, RowPrefixes, Target
from pipejax.methods.method_checks import check_target, ignored_settings, strategy_of
from pipejax.methods.pipelined import NamedRows, PipelinedMethod
from pipejax.methods.sequential import Beams, SequentialMethod, joined_change, split_rows, tells_rows_apart
from pipejax.methods.spelling import Spells, prefix_ids, separator_ids, shown, spell
from pipejax.system.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from pipejax.decoding import Drafter, Strategy

__all__ = [
    "ABILITIES",
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
    """The methods that the weights of this config can be asked for."""
    return (*STRATEGIES, own.name) if (own := _own(config)) else STRATEGIES


def methods_with(config: Config, ability: str) -> dict[str, Method]:
    """The methods of a config that have one of ABILITIES and do not go against its settings, by name."""
    found = dict[str, Method]()
    for name in names(config):
        with contextlib.suppress(UserError):
            if ability in (method := make(name, config)).can:
                found[name] = method
    return found


def default(config: Config) -> str:
    """The method that the weights were trained for; of weights that were never trained here, the sequential one."""
    if own := _own(config):
        return own.name
    return "sequential" if config.train.objective == "none" else config.train.objective


def trained(config: Config) -> Method:
    """The method by which a run is trained; if its class is not imported, one of its name that cannot do anything."""
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
    """The method of that name with the settings of a config.

    Raises:
      UserError: there is none; or its settings contradict each other.
    """
    known = names(config)
    if name not in known:
        raise UserError(f"strategy: found {name!r}; expected one of {', '.join(known)}{did_you_mean(name, known)}")
    beams = config.decode.beams
    if beams > 1 and name != SequentialMethod.name:
        raise UserError(f"decode.beams: found {beams}; expected 1, since beam search is sequential, not {name}")
    if (own := _own(config)) and name == own.name:
        return own
    if name == PipelinedMethod.name:
        return PipelinedMethod.of(config)
    plain = SequentialMethod.of(config)
    if beams == 1:
        return plain
    return Beams(plain.max_length, plain.separator, plain.delay, beams, config.decode.length_penalty)


def check(method: Method, decode: DecodeConfig, *, drafts: bool = False) -> None:
    """Raises a UserError if the method cannot do what is asked for, or settings contradict each other."""
    if decode.samples > 1 and decode.temperature == 0:
        raise UserError(
            f"decode.samples: found {decode.samples} with decode.temperature = 0; expected a temperature above 0, "
            "since all of them would be the same"
        )
    for ability, key, plain in (
        ("sample", "temperature", 0.0),
        ("score", "scores", False),
        ("limit", "limit", "none"),
        ("unique", "unique_rows", False),
        ("draft", "draft", "none"),
    ):
        if (found := getattr(decode, key)) != plain:
            method.require(ability, f"decode.{key}: found {found}", plain)
    if drafts:
        method.require("draft", "drafter: found one")
    elif decode.trace and decode.draft == "none":
        raise UserError(
            "decode.trace: found True with decode.draft = none; expected a drafter, since a trace shows drafts"
        )


def check_training(config: Config) -> None:
    """Raises a UserError unless a run can be trained by its method, and evaluations can decode by it."""
    method = make(default(config), config)
    method.check()  # else the first decode would refuse it
    check(method, config.decode)


def make_strategy(
    method: Method, decode: DecodeConfig, ids: Ids, drafter: "Drafter | None" = None, *, drafts: bool = True
) -> "Strategy":
    """The strategy that decodes by a method, with drafts if the settings and `drafts` say so."""
    check(method, decode, drafts=drafter is not None)
    made = strategy_of(method, ids)
    if not drafts or (drafter is None and decode.draft == "none"):
        return made
    from pipejax.decoding import drafted

    return drafted(made, decode, drafter)


def training_mismatches(name: str, config: Config, learned: Config) -> list[str]:
    """Lines that say why its output means little, if it does: the weights learned another, or other settings."""
    method, saved, lines = make(name, config), learned.method, list[str]()
    then = {"class": default(learned)} if saved is None else described(saved)
    if then["class"] != (name if name in STRATEGIES else described(method)["class"]):
        never = saved is None and learned.train.objective == "none"
        found = "never trained for any objective here" if never else f"trained with the {then['class']} objective"
        lines.append(f"these weights were {found}; {name} decoding runs, but its output means little")
    before = {f"method.{key}": value for key, value in then.items()} | trained(learned).learned()
    for key, now in method.learned().items():
        if (was := before.get(key, now)) != now:
            line = f"{key}: found {now!r}, but these weights were trained with {was!r}"
            lines.append(f"{line}; what {method.label} writes means little")
    return lines


def _own(config: Config) -> Method | None:
    """The config's own method."""
    own = made(config.method) if isinstance(config.method, dict) else config.method
    if own is None:
        return None
    if not isinstance(own, Method):
        raise UserError(f"method: found {own!r}; expected an object of a subclass of pipejax.Method")
    if own.name in ("", *STRATEGIES):
        raise UserError(f"method: found {type(own).__name__} with the name {own.name!r}; expected one that is free")
    return own
