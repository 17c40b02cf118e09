"""Writes tests/messages.txt, which has all messages of pipejax as users see them, by module.

    python -m tools.messages

The messages are collected from the source: errors, log lines, warnings, notes, and help texts of flags. An inserted
value is shown by its name in braces, "{path}", and one of several texts as "{one | another}".
"""

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "tests" / "messages.txt"
ERRORS = ("UserError", "LostRows", "_Lost")  # called with `place`, `problem`, `found`, `expected` and `hint`
PLACED = ("unsuitable", "_schema_refusal", "refuse")  # called with place, found and expected
OTHERS = {"ArgumentTypeError": (0, "error"), "Refused": (1, "error"), "add_number": (1, "help")}
LOGGED = {
    "_say_once": "log",
    "note": "note",
    "line": "note",
    "info": "log",
    "warning": "warning",
    "error": "log error",
    "warn": "warning",
}
HELPS = ("help", "description", "epilog")
Texts = Mapping[str, ast.expr]  # the expressions of local variables that hold a text, by name


def main() -> None:
    """Writes the file."""
    TARGET.write_text(collected(), encoding="utf-8")


def collected() -> str:
    """Collects the messages from the source; returns the content of tests/messages.txt."""
    parts = []
    for path in sorted((ROOT / "pipejax").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = {f"  {kind}: {text}" for kind, text in _messages(tree) if _has_words(text)}
        if lines:
            parts.append("\n".join([path.relative_to(ROOT).as_posix(), *sorted(lines)]))
    return "\n\n".join(parts) + "\n"


def _messages(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The kind and the text of each message in a module."""
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))]
    texts = {scope: _local_texts(scope) for scope in scopes}
    for scope in scopes:
        for node in _own_nodes(scope):
            if isinstance(node, ast.Call):
                yield from _of_call(node, functools.partial(_shown, texts=texts[tree] | texts[scope]))


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module or function, without the functions that are defined in it."""
    nodes = [*ast.iter_child_nodes(scope)]
    while nodes:
        node = nodes.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            nodes += ast.iter_child_nodes(node)


def _of_call(call: ast.Call, shown: Callable[[ast.expr], str]) -> Iterator[tuple[str, str]]:
    name = _name(call.func)
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    if name in ERRORS:
        parts = {part: shown(x) for part, x in given.items()}
        parts |= {part: shown(x) for part, x in zip(("place", "problem"), call.args, strict=False)}
        yield "error", _joined(parts)
    elif name in PLACED and len(call.args) == 3:
        yield "error", _joined(dict(zip(("place", "found", "expected"), map(shown, call.args), strict=True)))
    elif name == "refuse" and len(call.args) == 4:
        # The function in `strategy_checks` has the owner of the place as an argument.
        owner, *rest = map(shown, call.args)
        yield "error", f"{owner}." + _joined(dict(zip(("place", "found", "expected"), rest, strict=True)))
    elif name in OTHERS and len(call.args) > OTHERS[name][0]:
        place, kind = OTHERS[name]
        yield f"{kind} {_flag(call)}".rstrip() if kind == "help" else kind, shown(call.args[place])
    elif name in LOGGED and call.args and _is_logged(call.func):
        yield LOGGED[name], shown(call.args[0])
    for word in HELPS:
        if word in given:
            yield f"help {_flag(call)}".rstrip(), shown(given[word])


def _flag(call: ast.Call) -> str:
    """The flag or argument that a call of `add_argument` adds, or the command of a parser."""
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _joined(parts: Mapping[str, str]) -> str:
    """The text of a UserError with these parts; a place alone is a complete text."""
    words = [parts.get("problem"), *(f"{name} {parts[name]}" for name in ("found", "expected") if name in parts)]
    text = "; ".join(word for word in words if word)
    place, hint = parts.get("place"), parts.get("hint")
    return ": ".join(part for part in (place, text) if part) + (f" ({hint})" if hint else "")


def _is_logged(function: ast.expr) -> bool:
    """Whether a call of a function named as in LOGGED writes a line: a function, or a method of a logger."""
    if isinstance(function, ast.Name):
        return function.id in ("note", "_say_once")
    owner = _name(function.value) if isinstance(function, ast.Attribute) else ""
    return owner in ("logger", "cli", "warnings", "progress")


def _local_texts(scope: ast.AST) -> dict[str, ast.expr]:
    """The variables of a module or function that are assigned once, with a text as the value."""
    found: dict[str, list[ast.expr]] = {}
    for node in _own_nodes(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1 and _is_text(values[0])}


def _is_text(x: ast.expr) -> bool:
    if isinstance(x, ast.IfExp):
        return _is_text(x.body) and _is_text(x.orelse)
    return isinstance(x, ast.JoinedStr) or (isinstance(x, ast.Constant) and isinstance(x.value, str))


def _shown(x: ast.expr, texts: Texts) -> str:
    """The text of an expression, with names for values that are known only at run time."""
    if isinstance(x, ast.Constant):
        return " ".join(str(x.value).split("\n"))
    if isinstance(x, ast.JoinedStr):
        return "".join(_shown(part, texts) for part in x.values)
    if isinstance(x, ast.FormattedValue):
        return _shown(x.value, texts)
    if isinstance(x, ast.IfExp) and _is_text(x):
        return f"{{{_shown(x.body, texts)} | {_shown(x.orelse, texts)}}}"
    if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Add) and (_is_text(x.left) or _is_text(x.right)):
        return _shown(x.left, texts) + _shown(x.right, texts)
    if isinstance(x, ast.Name) and x.id in texts:
        text = texts[x.id]
        return _shown(text, {name: known for name, known in texts.items() if name != x.id})
    return f"{{{_name(x) or '...'}}}"


def _name(x: ast.expr) -> str:
    """A name for the value of an expression: the name of its variable, attribute, or argument."""
    if isinstance(x, ast.Name):
        return x.id
    if isinstance(x, ast.Attribute):
        return _name(x.value) if x.attr == "__name__" else x.attr
    if isinstance(x, ast.Call) and _name(x.func) in ("did_you_mean", "_suggestion"):
        return "did you mean ...?"
    if isinstance(x, ast.Call):
        return next((name for name in map(_name, x.args) if name), "") or _name(x.func)
    if isinstance(x, ast.Subscript | ast.Starred):
        return _name(x.value)
    if isinstance(x, ast.BinOp | ast.BoolOp):
        return _name(x.left if isinstance(x, ast.BinOp) else x.values[0])
    if isinstance(x, ast.IfExp):
        return _name(x.body) or _name(x.orelse)
    if isinstance(x, ast.GeneratorExp | ast.ListComp):
        return _name(x.elt) or _name(x.generators[0].iter)
    return ""


def _has_words(text: str) -> bool:
    """Whether a text has words in addition to inserted values."""
    depth, own = 0, ""
    for character in text:
        depth += (character == "{") - (character == "}")
        own += character if not depth and character not in "{}" else ""
    return any(map(str.isalpha, own)) or " | " in text


if __name__ == "__main__":
    main()
