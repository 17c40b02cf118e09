"""Markdown from the code: keys of the config with ranges, defaults and comments, public names, and rules of checks."""

import dataclasses
import inspect
import tokenize
from collections.abc import Sequence
from typing import Any

import pipejax
from pipejax import testing
from pipejax.config import SETTINGS, Config
from pipejax.system import fields

# Beside a public name: the lines of its directive of autodoc, where all members would be too many or too few.
OPTIONS = {
    "Config": [],
    "Generator": [":members: decode, stream_rows, warm_up, adapted, default_method"],
    "Record": [":members:", ":exclude-members: __init__, __new__"],
    "RowEvent": [":members:", ":exclude-members: __init__, __new__"],
    "testing": [":members: check_method, check_backbone"],
}


def public_names() -> str:
    """A directive of autodoc for each public name of pipejax, functions first."""
    found = {name: getattr(pipejax, name) for name in pipejax.__all__}
    lines = ["```{eval-rst}"]
    for name in sorted(found, key=lambda name: (not inspect.isfunction(found[name]), name)):
        kind, options = _kind(found[name]), OPTIONS.get(name, [":members:"])
        lines += [f".. auto{kind}:: pipejax.{name}", *(f"   {line}" for line in options if kind != "function"), ""]
    return "\n".join([*lines, "```"])


def requirements(piece: str) -> str:
    """A list of the rules by which `pipejax.testing` checks a "method" or a "backbone"."""
    tables: dict[str, Sequence[testing.Requirement[Any]]] = {
        "method": testing.METHOD_REQUIREMENTS,
        "backbone": testing.BACKBONE_REQUIREMENTS,
    }
    return "\n".join(f"- **{requirement.name}**: {requirement.text}" for requirement in tables[piece])


def _kind(value: object) -> str:
    """The word of autodoc for a value."""
    if inspect.ismodule(value):
        return "module"
    if not isinstance(value, type):
        return "function"
    return "exception" if issubclass(value, BaseException) else "class"


def table(name: str) -> str:
    """The keys of a section; of "" those that stand above all sections."""
    cls, prefix = (section(name), f"{name}.") if name else (Config, "")
    said, kinds = comments(cls), fields.types_of(cls)
    lines = ["| key | default | values | |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        if not name and field.name not in SETTINGS:
            continue  # a section
        cells = [f"`{prefix}{field.name}`", default(field), values(field, kinds[field.name]), said[field.name]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def section(name: str) -> type:
    """The dataclass of a section of the config."""
    kinds = fields.alternatives(fields.types_of(Config)[name])
    return next(kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind))


def comments(cls: type) -> dict[str, str]:
    """Returns the comment of each field of a dataclass, on its line or on the lines above it; "" without one."""
    lines, _ = inspect.getsourcelines(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    found, current, above = dict.fromkeys(names, ""), "", ""
    for token in tokenize.generate_tokens(iter(lines).__next__):
        line = token.line.strip()
        first = line.partition(":")[0]
        if first in names and first != current:
            current, found[first], above = first, above, ""
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            if line.startswith("#"):
                above = f"{above} {words}".strip()
            elif current:
                found[current] = f"{found[current]} {words}".strip()
    return found


def default(field: dataclasses.Field[Any]) -> str:
    """The default in words."""
    if field.default is dataclasses.MISSING:
        return "must be given"
    value = field.default
    if value is None or value == "" or value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value!r}`" if isinstance(value, str) and value != value.strip() else f"`{value}`"  # spaces count


def values(field: dataclasses.Field[Any], kind: Any) -> str:
    """What a key may hold."""
    rule = field.metadata
    if rule.get("choices"):
        return ", ".join(f"`{choice}`" for choice in rule["choices"] if choice)
    words = {"least": "at least", "most": "at most", "above": "more than", "below": "less than"}
    bounds = [f"{word} {number(rule[name])}" for name, word in words.items() if rule.get(name) is not None]
    if dataclasses.is_dataclass(next(iter(fields.alternatives(kind)))):
        return "a section"
    return ", ".join([fields.noun(kind), *bounds])


def number(value: float) -> str:
    """A bound; large powers of two as powers."""
    whole = int(value)
    if value == whole and whole >= 2**10 and whole & (whole - 1) == 0:
        return f"2^{whole.bit_length() - 1}"
    return f"2^{(whole + 1).bit_length() - 1} - 1" if whole == 2**31 - 1 else f"{value:g}"
