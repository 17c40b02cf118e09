"""The field response_format of a request: a JSON schema that its answers follow."""

from collections.abc import Mapping

from pipejax.apps.serving.refusals import Refused, unsuitable
from pipejax.data.lines import Object
from pipejax.inference.generator import Generator
from pipejax.system.errors import UserError

TYPES = "json_schema", "text"


def read(given: Object, generator: Generator, strategy: str) -> Generator:
    """The generator under the schema of a request, or as it is if the request has none.

    Args:
      given: the request's fields, of any route.
      generator: that would answer.
      strategy: the name of the method.

    Raises:
      Refused: the format is unknown, or rows cannot follow the schema; or another field cannot go with it.
    """
    found = given.get("response_format", {"type": "text"})
    kind = found.get("type") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or kind not in TYPES:
        raise unsuitable("response_format", found, f"an object whose type is one of {', '.join(TYPES)}")
    if kind == "text":
        return generator
    named = found.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise unsuitable("response_format json_schema", named, 'an object such as {"schema": {"type": "object", ...}}')
    for name in ("stop", "logprobs"):
        if given.get(name) not in (None, [], False):
            raise unsuitable(name, given[name], "none with response_format: the answer is JSON made of rows")
    if given.get("stream") and given.get("rows"):
        raise unsuitable("rows", True, "none with response_format and stream: the chunks are JSON made of rows")
    try:
        return generator.under(schema, strategy)
    except UserError as error:
        raise Refused(400, f"response_format: {error}", field="response_format") from error


def row_tokens(generator: Generator, strategy: str, max_tokens: int | None) -> int | None:
    """The tokens that each row of an answer may have, so that all have at most so many.

    Raises:
      Refused: they are too few for some row.
    """
    schema = generator.schema
    if schema is None or max_tokens is None:
        return None
    most = max_tokens // len(schema.rows)
    try:
        schema.grammar(generator.make_strategy(strategy, drafts=False), [most])
    except UserError as error:
        raise Refused(
            400, f"max_tokens: found {max_tokens} for {len(schema.rows)} rows ({error})", field="max_tokens"
        ) from error
    return most
