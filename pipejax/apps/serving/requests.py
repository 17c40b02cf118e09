"""Parses the body of a request, field by field: the fields of each route, and the errors for unsupported values."""

import codecs
import dataclasses
import difflib
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, cast

from pipejax import methods, moved
from pipejax.apps.serving.refusals import Refused, Shown, unsuitable
from pipejax.config import Config, DecodeConfig
from pipejax.config.row_names import columns_of
from pipejax.data.encoding import encode_source
from pipejax.data.lines import Object, kind
from pipejax.decoding import Sampling
from pipejax.inference.answer_format import AnswerFormat
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source, check_fields, fields_of, template_of
from pipejax.methods import Method
from pipejax.system import strict_json
from pipejax.system.errors import UserError
from pipejax.system.fields import WHOLE, Facts

Apply = Callable[
    [Mapping[str, object], Generator, str], Generator
]  # applies a schema to a model, for the method with the given name
Neutral = Mapping[str, tuple[object, ...]]  # the values of each field that have no effect


@dataclasses.dataclass(frozen=True)
class RequestFields:
    """The fields in the bodies of a route, and the fields of OpenAI that the route ignores or refuses."""

    prompts: Callable[
        [Object, str, Config], tuple[list[object], bool]
    ]  # returns the sources, and whether parts of the input are ignored
    source: str  # the field with the sources
    most_tokens: tuple[str, ...]  # fields that may limit the tokens of an answer; a request may have one such field
    more: tuple[str, ...]  # fields that only some routes have
    neutral: Neutral  # unsupported fields, with their values that have no effect
    unused: tuple[str, ...]  # fields that are ignored

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of all fields that a request may have."""
        return self.source, "model", *self.most_tokens, *SHARED, *self.more


# The settings of sampling that a request may send, by name. If `Facts.request` is a range, requests have this range.
SAMPLING = {field.name: field for field in dataclasses.fields(DecodeConfig) if field.metadata.get("request")}
SHARED = (*SAMPLING, "method", "stop", "stream", "stream_options", "truncate")
FORMER = {"strategy": "method"}  # maps former names of fields, which work until the next release, to present names
SEEDS = 2**31  # seeds are drawn below this number for requests without one
STOPS, STOP_LENGTH = 4, 200  # the most stop texts, and the most characters of each
ROLES = ("user", "system", "developer", "assistant", "tool", "function")
TEXTS = ("text", "input_text")  # types of the parts of a message that are read
FORMATS = "json_schema", "json_object", "text"
FORMAT_FIELDS: dict[str, type] = {"type": str, "name": str, "description": str, "schema": Mapping, "strict": bool}


@dataclasses.dataclass(frozen=True)
class ClientRequest:
    """A parsed and checked request. Sample k of prompt i is choice i * n + k."""

    model: str  # the model's name
    sources: tuple[Source, ...]  # token ids
    cut_tokens: int  # the number of tokens that were cut from prompts beyond the model's limit
    method: str  # the name of the method
    sampling: Sampling  # its seed is the request's, from which the seed of each source is derived
    n: int
    max_tokens: int | None
    row_tokens: int | None  # the most tokens of each row, in place of `max_tokens`, if answers follow a schema
    echoed: Object  # the fields of the request that a response repeats, with the format of the answers
    logprobs: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    rows: bool
    ignored_settings: bool  # whether there are messages that the model does not read

    @property
    def answer_format(self) -> AnswerFormat | None:
        """The format of the answers, or None."""
        return self.sources[0].answer_format

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(len(source.content) for source in self.sources)


def parse_body(body: bytes) -> dict[str, object]:
    """Parses the JSON object of a body.

    Raises:
      Refused: the body is not a JSON object.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        found = strict_json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except strict_json.DuplicateKey as error:
        raise Refused(400, UserError("body", found=error.found, expected=error.expected)) from error
    except (ValueError, RecursionError) as error:
        said = "a number of too many digits" if isinstance(error, ValueError) else "lists or objects nested too deeply"
        if isinstance(error, json.JSONDecodeError):
            said = f"{error.msg} at character {error.pos}"
        elif isinstance(error, UnicodeDecodeError):
            said = f"byte {body[error.start]:#04x} at {error.start} is not UTF-8"
        raise Refused(400, UserError("body", found=f"no JSON ({said})", expected="a JSON object in UTF-8")) from error
    if not isinstance(found, dict):
        names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
        given = names.get(type(found), "nothing")
        raise Refused(400, UserError("body", found=given, expected="a JSON object"))
    return found


def _no_number(name: str) -> None:
    raise Refused(400, UserError("body", found=name, expected="numbers of JSON, which are finite"))


def read_request(
    body: Object,
    form: RequestFields,
    models: Mapping[str, Generator],
    *,
    most: int,
    apply: Apply | None,
) -> ClientRequest:
    """Parses and checks a request.

    Args:
      body: the JSON object.
      form: the fields of the route.
      models: the models by name.
      most: the most answers of a request.
      apply: applies schemas; None: schemas are refused.

    Raises:
      Refused: a field is unknown, invalid or not supported.
    """
    given = _supported(body, form)
    model = given.get("model", next(iter(models)))
    if not isinstance(model, str) or model not in models:
        raise unknown_model(model, models)
    generator = models[model]
    defaults = vars(generator.config.decode) | {"seed": secrets.randbelow(SEEDS)}
    temperature = _setting(given, "temperature", defaults)
    n = _whole(given, "n", 1, least=1, most=most)
    if n > 1 and temperature == 0:
        raise unsuitable("n", n, "1 at temperature 0, since all answers would be the same")
    logprobs = _whole(given, "logprobs", -1, least=0, most=1) if "logprobs" in given else None
    if logprobs and temperature > 0:
        raise unsuitable("logprobs", logprobs, "0 above temperature 0; only the chosen token is reported")
    method = given.get("method", generator.default_method)
    served = methods.methods_with(generator.config, "serve")
    if not isinstance(method, str) or method not in served:
        raise unsuitable("method", method, f"one of {', '.join(served)}")
    stream, rows = _flag(given, "stream"), _flag(given, "rows")
    stop = _stop(given)
    options = _stream_options(given, served[method], stream=stream, rows=rows, stop=bool(stop))
    prompts, ignored_settings = form.prompts(given, form.source, generator.config)
    if len(prompts) > most // n:
        raise unsuitable(form.source, Shown(f"{len(prompts)} prompts"), f"at most {most // n} with this n")
    under = apply_format(given, generator, method, apply)
    bound = _most_tokens(given, form.most_tokens)
    row_tokens = bound_rows(under, method, *bound)
    sources, cut = _sources(prompts, form.source, under, truncate=_flag(given, "truncate"))
    return ClientRequest(
        model=model,
        sources=sources,
        cut_tokens=cut,
        method=method,
        sampling=Sampling(**{name: _setting(given, name, defaults) for name in SAMPLING}),
        n=n,
        max_tokens=bound[1] if row_tokens is None else None,
        row_tokens=row_tokens,
        echoed={
            **{name: given[name] for name, kind in ECHOED.items() if isinstance(given.get(name), kind)},
            "text": {"format": echo(given)},
            "max_output_tokens": bound[1],
            "truncation": "auto" if given.get("truncate") else "disabled",
        },
        logprobs=logprobs,
        stop=stop,
        stream=stream,
        include_usage=_flag(options, "include_usage"),
        rows=rows,
        ignored_settings=ignored_settings,
    )


def _stream_options(given: Object, method: Method, *, stream: bool, rows: bool, stop: bool) -> Object:
    """Checks the fields of a request that need a stream of tokens; returns the "stream_options".

    Raises:
      Refused: the method does not stream, or fields exclude each other.
    """
    for name, asks in (("stream", stream), ("stop", stop)):
        if asks and "stream" not in method.can:
            raise unsuitable(name, given[name], f"none: {method.label} does not {methods.ABILITIES['stream'].does}")
    if stop and rows:
        raise unsuitable("stop", given["stop"], "none with rows, since a record has the whole answer")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise unsuitable("stream_options", options, 'an object such as {"include_usage": true}')
    if options and not stream:
        raise unsuitable("stream_options", options, "none without stream")
    return options


ECHOED: dict[str, type] = {"instructions": str, "metadata": Mapping, "user": str, "safety_identifier": str}
ECHOED |= {"prompt_cache_key": str, "max_tool_calls": int}


def _supported(body: Object, form: RequestFields) -> Object:
    """Returns the fields of a body, by present names, without the fields whose values have no effect.

    Raises:
      Refused: a field is unknown, is given by its former and its present name, or has a value that is not supported.
    """
    given = {name: value for name, value in body.items() if value is not None}
    try:
        given = moved.with_present_names(given, FORMER, lambda old, new: moved.note(f"the request field {old}", new))
    except UserError as error:
        raise Refused(400, error, field=error.place) from error
    for name, value in [*given.items()]:
        if (neutral := form.neutral.get(name)) is not None:
            del given[name]
            if not any(type(value) in (type(other), float) and value == other for other in neutral):
                known = f"{json.dumps(neutral[0])} or " if neutral else ""
                raise unsuitable(name, value, f"{known}nothing, since other values are not supported")
        elif name not in (*form.fields, *form.unused):
            guess = difflib.get_close_matches(name, form.fields, n=1)
            hint = f' (did you mean "{guess[0]}"?)' if guess else ""
            raise unsuitable(name, Shown("an unknown field"), f"one of {', '.join(form.fields)}{hint}")
    return given


def unknown_model(name: object, models: Mapping[str, Generator]) -> Refused:
    """Returns the error response for an unknown model."""
    return unsuitable("model", name, " or ".join(map(repr, models)), status=404, code="model_not_found")


def _most_tokens(given: Object, names: tuple[str, ...]) -> tuple[str, int | None]:
    there = [name for name in names if name in given]
    if len(there) > 1:
        raise unsuitable(there[1], given[there[1]], f"none together with {there[0]}, which has the same meaning")
    name = there[0] if there else names[0]
    return name, _whole(given, name, 0, least=1, most=2**20, otherwise="null for no bound") if there else None


def _sources(
    prompts: list[object], field: str, generator: Generator, *, truncate: bool
) -> tuple[tuple[Source, ...], int]:
    """Returns the sources of prompts as token ids, and the number of tokens that were cut.

    Raises:
      Refused: a prompt is invalid, or too long without `truncate`.
    """
    longest, cut, sources = generator.config.data.max_source, 0, []
    try:
        check_fields(fields_of(generator.config), prompts, field)
        for i, prompt in enumerate(prompts):
            place = f"{field} {i}" if len(prompts) > 1 else field
            for name in ("row_prefixes", "max_rows"):
                if isinstance(prompt, dict) and prompt.get(name):
                    raise UserError(
                        place, found=f'"{name}"', expected="none; only `pipejax decode` and Python support it"
                    )
            source = generator.source(prompt, place, i)
            ids, left_out = encode_source(
                source.content, generator.config.data, generator.tokenizer, generator.architecture
            )
            if left_out and not truncate:
                expected = f"at most {longest}, or truncate: true"
                raise unsuitable(
                    place, Shown(f"{len(ids) + left_out} tokens"), expected, code="context_length_exceeded"
                )
            cut += left_out
            sources.append(source._replace(content=ids))
    except UserError as error:
        raise Refused(400, error, field=field) from error
    return tuple(sources), cut


KINDS = {str: "texts", dict: "objects", list: "lists", int: "numbers", float: "numbers", bool: "booleans"}


def _prompts(given: Object, field: str, config: Config) -> tuple[list[object], bool]:
    """Returns the prompts, one for each source: a text, an object, or a list of token ids."""
    prompt = given.get(field)
    expected = "a text, an object with the template's fields, a list of token ids, or a list of prompts of one kind"
    if prompt is None:
        raise unsuitable("prompt", Shown("nothing"), expected)
    if isinstance(prompt, str | dict):
        return [prompt], False
    if not isinstance(prompt, list) or not prompt:
        raise unsuitable("prompt", prompt, expected)
    if all(isinstance(one, int | float) for one in prompt):  # a list of token ids; non-integers are refused later
        return [prompt], False
    kinds = dict.fromkeys(KINDS.get(type(one), "null") for one in prompt)
    if len(kinds) > 1 or "null" in kinds:
        raise unsuitable("prompt", Shown(f"a list of {' and '.join(kinds)}"), expected)
    return prompt, False


# An encoder-decoder reads one text of a conversation: the user's last message.


def _last_message(given: Object, field: str, config: Config) -> tuple[list[object], bool]:
    """Returns the source in `messages` or `input`, and whether other messages or instructions are ignored."""
    messages = given.get(field)
    if field == "input" and isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        found = Shown("nothing") if messages is None else messages
        raise unsuitable(field, found, "a list of messages, at least one of them by the user")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise unsuitable(f"{field} {i}", Shown(kind(message)), "an object with role and content")
        if "type" not in message and message.get("role") not in ROLES:
            raise unsuitable(f"{field} {i}", message.get("role"), f"a role: one of {', '.join(ROLES)}")
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        raise unsuitable(
            field, Shown("no message of a user"), "at least one, since the last message of the user is the source"
        )
    text = _text_of_parts(messages[users[-1]].get("content"), f"{field} {users[-1]}")
    # With a template of one field, the text fills that field. With several fields, the text is the whole source.
    fields = {*template_of(config).fields}
    ignored_settings = len(messages) > 1 or bool(given.get("instructions"))
    return [{fields.pop(): text} if len(fields) == 1 else text], ignored_settings


def _text_of_parts(content: object, place: str) -> str:
    """Returns the text of a message's content: a text, or a list of parts with text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise unsuitable(place, Shown(f"the content {kind(content)}"), "a text, or a list of parts that are text")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            found = part.get("type") if isinstance(part, dict) else part
            raise unsuitable(
                place, found, f"parts with a text, of the type {' or '.join(TEXTS)}; only text is supported"
            )
        texts.append(part["text"])
    return "\n".join(texts)


# The JSON schema of answers: the fields response_format and text.format.


def apply_format(
    given: Object,
    generator: Generator,
    method: str,
    apply: Apply | None,
) -> Generator:
    """Returns the generator with the schema of the request; without a schema, the generator unchanged.

    `apply` is None if the server refuses schemas.

    Raises:
      Refused: the format is invalid, or the schema is not supported.
    """
    field, found = _format(given)
    kind = found.get("type") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or kind not in FORMATS:
        raise unsuitable(field, found, f"an object whose type is one of {', '.join(FORMATS)}")
    if kind == "text":
        return generator
    if apply is None:
        raise unsuitable(field, kind, 'none or {"type": "text"}, since this server does not support schemas')
    if kind == "json_object":
        config = generator.config
        if not (names := columns_of(config.data.columns, config.grid.row_names)):
            expected = (
                '{"type": "json_schema", ...} with the properties of the object, since this model has no row names'
            )
            raise unsuitable(field, kind, expected)
        schema: object = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    else:
        named = found.get("json_schema") if field == "response_format" else found
        schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise unsuitable(f"{field} json_schema", named, 'an object such as {"schema": {"type": "object", ...}}')
    for name in ("stop", "logprobs"):
        if given.get(name) not in (None, []):
            raise unsuitable(name, given[name], "none with a schema, since the answer is JSON made of rows")
    if given.get("stream") and given.get("rows"):
        raise unsuitable("rows", True, "none with a schema and stream, since the chunks are JSON made of rows")
    try:
        return apply(schema, generator, method)
    except UserError as error:
        raise Refused(400, error.within(field), field=field) from error


def echo(given: Object) -> dict[str, object]:
    """Returns the format that `apply_format` used, with OpenAI's fields and types, for the response."""
    _, found = _format(given)
    if not isinstance(found, Mapping) or found["type"] == "text":
        return {"type": "text"}
    return {name: found[name] for name, kind in FORMAT_FIELDS.items() if isinstance(found.get(name), kind)}


def _format(given: Object) -> tuple[str, object]:
    if "text" not in given:
        return "response_format", given.get("response_format", {"type": "text"})
    text = given["text"]
    if not isinstance(text, Mapping) or text.keys() - {"format", "verbosity"}:
        raise unsuitable("text", text, 'an object such as {"format": {"type": "text"}}')
    return "text.format", text.get("format") or {"type": "text"}


def bound_rows(generator: Generator, method: str, field: str, most: int | None) -> int | None:
    """Returns the most tokens of each row, so that all rows together do not exceed the limit of the request."""
    answer_format = generator.answer_format
    if answer_format is None or most is None:
        return None
    rows = len(answer_format.rows)
    each = most // rows
    try:
        answer_format.rule(generator.make_strategy(method, drafts=False), [each])
    except UserError as error:
        found = f"{most} for {rows} rows ({error})"
        raise Refused(400, UserError(field, found=found), field=field) from error
    return each


def _stop(given: Object) -> tuple[str, ...]:
    stop = given.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or len(texts) > STOPS:
        raise unsuitable("stop", stop, f"a text or a list of at most {STOPS} texts")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= STOP_LENGTH:
            raise unsuitable("stop", text, f"texts of 1 to {STOP_LENGTH} characters")
    return tuple(texts)


def _flag(given: Object, name: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise unsuitable(name, value, "true or false")
    return bool(value)


def _setting(given: Object, name: str, defaults: Mapping[str, Any]) -> int | float:
    """Returns the value of a setting of SAMPLING in a request, or the default."""
    facts, default = cast(Facts, SAMPLING[name].metadata), defaults[name]
    least, most = facts.get("least", facts.get("above", 0)), facts.get("most", WHOLE)
    if isinstance(own := facts["request"], tuple):
        least, most = own
    if isinstance(SAMPLING[name].default, int):
        return _whole(given, name, default, least=int(least), most=int(most))
    value = _number(given, name, default, least=least, most=most)
    if value == facts.get("above"):
        raise unsuitable(name, given[name], f"a number above {value:g}, at most {most:g}")
    return value


def _whole(given: Object, name: str, default: int, *, least: int, most: int, otherwise: str = "") -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        expected = f"a whole number from {least} to {most}"
        raise unsuitable(name, value, f"{expected}, or {otherwise}" if otherwise else expected)
    return value


def _number(given: Object, name: str, default: float, *, least: float, most: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise unsuitable(name, value, f"a number from {least:g} to {most:g}")
    return float(value)


_PENALTIES: Neutral = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
_TOOLS: Neutral = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "top_logprobs": (0,),
}
_UNUSED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)

COMPLETIONS = RequestFields(
    prompts=_prompts,
    source="prompt",
    most_tokens=("max_tokens",),
    more=("n", "logprobs", "rows", "response_format"),
    neutral={"best_of": (1,), "echo": (False,), "suffix": ("",), **_PENALTIES},
    unused=("user",),
)
CHAT = RequestFields(
    prompts=_last_message,
    source="messages",
    most_tokens=("max_completion_tokens", "max_tokens"),
    more=("n", "rows", "response_format"),
    neutral={
        **_PENALTIES,
        **_TOOLS,
        "logprobs": (False,),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "web_search_options": (),
    },
    unused=(*_UNUSED, "reasoning_effort", "verbosity", "prediction"),
)
RESPONSES = RequestFields(
    prompts=_last_message,
    source="input",
    most_tokens=("max_output_tokens",),
    more=("instructions", "text"),
    neutral={
        **_TOOLS,
        "n": (1,),
        "truncation": ("disabled",),
        "include": ([],),
        "background": (False,),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
    },
    unused=(*_UNUSED, "reasoning", "max_tool_calls"),
)
