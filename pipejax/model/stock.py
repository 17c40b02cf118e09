"""A picture of a module's code, by which a change from outside is seen."""

import types
from collections.abc import Mapping

Picture = dict[str, object]


def picture(space: Mapping[str, object]) -> Picture:
    """The functions, classes and numbers of a module's namespace: equal pictures compute the same.

    Of a function its code and defaults count, and of a function that a decorator wrapped also the inner one; of a class
    that stands in the module, its methods and attributes.
    """
    found: Picture = {}
    for name, value in space.items():
        if name.startswith("__") or name == "STOCK":
            continue
        found[name] = _of(value)
        if isinstance(value, type) and value.__module__ == space.get("__name__"):
            # Flax puts a subclass's view of the fields beside them; Python forgets a class's line when it is renamed.
            own = {n: _of(x) for n, x in vars(value).items() if not n.startswith(("__dataclass", "__m", "__first"))}
            found |= {f"{name}.{inner}": x for inner, x in own.items()}
    return found


def _of(value: object) -> object:
    inner = getattr(value, "fun", None) or getattr(value, "__wrapped__", None)
    if isinstance(value, types.FunctionType):
        own = value.__code__, value.__defaults__, dict(value.__kwdefaults__ or {})
        return id(value), own, _of(inner) if inner else None
    plain = isinstance(value, bool | int | float | str | tuple)
    return value if plain else (id(value), _of(inner) if callable(inner) and not isinstance(value, type) else None)
