"""The fields response_format and text.format of a request: a JSON schema that its answers follow."""

from collections.abc import Mapping

from pipejax.apps.serving.refusals import Refused, unsuitable
from pipejax.data.lines import Object
from pipejax.inference.generator import Generator
from pipejax.inference.schema import MARKS
from pipejax.system.errors import UserError

TYPES = "json_schema", "json_object", "text"
FIELDS: dict[str, type] = {"type": str, "name": str, "description": str, "schema": Mapping, "strict": bool}


def apply_format(given: Object, generator: Generator, strategy: str, *, schemas: bool, at_once: bool) -> Generator:
    """The generator under the schema of a request, if `schemas` allows one, or as it is if the request has none."""
    field, found = _format(given)
    kind = found.get("type") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or kind not in TYPES:
        raise unsuitable(field, found, f"an object whose type is one of {', '.join(TYPES)}")
    if kind == "text":
        return generator
    if not schemas:
        raise unsuitable(field, kind, 'none or {"type": "text"}, as this server follows no schemas')
    if kind == "json_object":
        if not (names := generator.config.grid.row_names):
            expected = '{"type": "json_schema", ...} with the properties of the object, as this model names no rows'
            raise unsuitable(field, kind, expected)
        schema: object = {"type": "object", "properties": {name.rstrip(MARKS): {"type": "string"} for name in names}}
    else:
        named = found.get("json_schema") if field == "response_format" else found
        schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise unsuitable(f"{field} json_schema", named, 'an object such as {"schema": {"type": "object", ...}}')
    for name in ("stop", "logprobs"):
        if given.get(name) not in (None, []):
            raise unsuitable(name, given[name], "none with a schema: the answer is JSON made of rows")
    if given.get("stream") and given.get("rows"):
        raise unsuitable("rows", True, "none with a schema and stream: the chunks are JSON made of rows")
    try:
        return generator.under(schema, strategy, at_once=at_once)
    except UserError as error:
        raise Refused(400, f"{field}: {error}", field=field) from error


def echo(given: Object) -> dict[str, object]:
    """The format that `apply_format` took, as a response says it: the fields of OpenAI's, of their types."""
    _, found = _format(given)
    if not isinstance(found, Mapping) or found["type"] == "text":
        return {"type": "text"}
    return {name: found[name] for name, kind in FIELDS.items() if isinstance(found.get(name), kind)}


def _format(given: Object) -> tuple[str, object]:
    if "text" not in given:
        return "response_format", given.get("response_format", {"type": "text"})
    text = given["text"]
    if not isinstance(text, Mapping) or text.keys() - {"format", "verbosity"}:
        raise unsuitable("text", text, 'an object such as {"format": {"type": "text"}}')
    return "text.format", text.get("format") or {"type": "text"}


def row_tokens(generator: Generator, strategy: str, field: str, most: int | None) -> int | None:
    """The tokens that each row of an answer may have, so that all have at most so many as the field bounds them to."""
    schema = generator.schema
    if schema is None or most is None:
        return None
    each = most // len(schema.rows)
    try:
        schema.grammar(generator.make_strategy(strategy, drafts=False), [each])
    except UserError as error:
        raise Refused(400, f"{field}: found {most} for {len(schema.rows)} rows ({error})", field=field) from error
    return each
