"""The body of a request, field by field: what may be asked on which route, and what is refused with which words."""

import codecs
import dataclasses
import difflib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence

from pipejax import methods
from pipejax.apps.serving import messages, response_format
from pipejax.apps.serving.refusals import Refused, Shown, unsuitable
from pipejax.config import Config
from pipejax.data.encoding import cut_source
from pipejax.data.lines import Object
from pipejax.data.tokenizer import source_ids
from pipejax.decoding import Sampling
from pipejax.inference.generator import Generator
from pipejax.inference.schema import Schema
from pipejax.inference.sources import Source, check_fields, fields_of
from pipejax.system.errors import UserError

Neutral = Mapping[str, tuple[object, ...]]  # by field the values that change nothing


@dataclasses.dataclass(frozen=True)
class Form:
    """The fields of a route's bodies: where they stand, and which of OpenAI's mean nothing here."""

    read: Callable[[Object, str, Config], tuple[list[object], bool]]  # the sources, and whether some of it is not read
    source: str  # the field that holds them
    most_tokens: tuple[str, ...]  # fields of which one may bound the tokens of an answer
    more: tuple[str, ...]  # fields that not all routes have
    neutral: Neutral  # fields that are not supported, and the values which change nothing
    unused: tuple[str, ...]  # fields that change nothing

    @property
    def fields(self) -> tuple[str, ...]:
        return self.source, "model", *self.most_tokens, *SHARED, *self.more


SHARED = ("temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "strategy", "truncate")
SEEDS = 2**31  # that are drawn for requests without one
STOPS, STOP_LENGTH = 4, 200  # texts, characters


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, read and checked; sample k of prompt i is choice i * n + k."""

    model: str  # its name
    sources: tuple[Source, ...]  # token ids
    cut_tokens: int  # of the prompts, that the model will not read
    strategy: str
    sampling: Sampling  # its seed is not yet the source's own
    n: int
    max_tokens: int | None
    row_tokens: int | None  # of each row, in the place of `max_tokens` if answers follow a schema
    echoed: Object  # as a response says it: the format of the answers, and what was asked beside it
    logprobs: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    rows: bool
    unread: bool  # whether there are messages that the model does not read

    @property
    def schema(self) -> Schema | None:
        return self.sources[0].schema

    @property
    def prompt_tokens(self) -> int:
        return sum(len(source.content) for source in self.sources)


def parse(body: bytes) -> dict[str, object]:
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        said = "a number of too many digits" if isinstance(error, ValueError) else "lists or objects in too many others"
        if isinstance(error, json.JSONDecodeError):
            said = f"{error.msg} at character {error.pos}"
        elif isinstance(error, UnicodeDecodeError):
            said = f"byte {body[error.start]:#04x} at {error.start} is not UTF-8"
        raise Refused(400, f"body: found no JSON ({said}); expected a JSON object in UTF-8") from error
    if not isinstance(found, dict):
        names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
        raise Refused(400, f"body: found {names.get(type(found), 'nothing')}; expected a JSON object")
    return found


def _no_number(name: str) -> None:
    raise Refused(400, f"body: found {name}; expected numbers of JSON, which are finite")


def read(
    body: Object, form: Form, models: Mapping[str, Generator], *, most: int, schemas: bool, at_once: bool = False
) -> Asked:
    """The request in a body; the last three: see `app.Limits.answers` and `response_format.read`."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in [*given.items()]:
        if (neutral := form.neutral.get(name)) is not None:
            del given[name]
            if not any(type(value) in (type(other), float) and value == other for other in neutral):
                known = f"{json.dumps(neutral[0])} or " if neutral else ""
                raise unsuitable(name, value, f"{known}nothing, as it is not supported")
        elif name not in (*form.fields, *form.unused):
            guess = difflib.get_close_matches(name, form.fields, n=1)
            hint = f' (did you mean "{guess[0]}"?)' if guess else ""
            raise unsuitable(name, Shown("an unknown field"), f"one of {', '.join(form.fields)}{hint}")
    model = given.get("model", next(iter(models)))
    if not isinstance(model, str) or model not in models:
        raise unknown_model(model, models)
    generator = models[model]
    decode = generator.config.decode
    temperature = _number(given, "temperature", decode.temperature, least=0.0, most=100.0)
    top_p = _number(given, "top_p", decode.top_p, least=0.0, most=1.0)
    if top_p == 0:
        raise unsuitable("top_p", given["top_p"], "a number above 0, at most 1")
    n = _whole(given, "n", 1, least=1, most=most)
    if n > 1 and temperature == 0:
        raise unsuitable("n", n, "1 at temperature 0, where all answers are the same")
    logprobs = _whole(given, "logprobs", -1, least=0, most=1) if "logprobs" in given else None
    if logprobs and temperature > 0:
        raise unsuitable("logprobs", logprobs, "0 above temperature 0: alternatives to the chosen token are not kept")
    strategy = given.get("strategy", generator.default_strategy)
    served = methods.able(generator.config, "serve")
    if not isinstance(strategy, str) or strategy not in served:
        raise unsuitable("strategy", strategy, f"one of {', '.join(served)}")
    stream, rows = _flag(given, "stream"), _flag(given, "rows")
    stop = _stop(given)
    for name, asks in (("stream", stream), ("stop", stop)):
        if asks and "stream" not in (method := served[strategy]).can:
            raise unsuitable(name, given[name], f"none: {method.label} does not {methods.ABILITIES['stream']}")
    if stop and rows:
        raise unsuitable("stop", given["stop"], "none with rows: a record is of a whole answer")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise unsuitable("stream_options", options, 'an object such as {"include_usage": true}')
    if options and not stream:
        raise unsuitable("stream_options", options, "none without stream")
    prompts, unread = form.read(given, form.source, generator.config)
    if len(prompts) > most // n:
        raise unsuitable(form.source, Shown(f"{len(prompts)} prompts"), f"at most {most // n} with this n")
    under = response_format.read(given, generator, strategy, schemas=schemas, at_once=at_once)
    bound = _most_tokens(given, form.most_tokens)
    row_tokens = response_format.row_tokens(under, strategy, *bound)
    sources, cut = _sources(prompts, form.source, under, truncate=_flag(given, "truncate"))
    return Asked(
        model=model,
        sources=sources,
        cut_tokens=cut,
        strategy=strategy,
        sampling=Sampling(
            temperature=temperature,
            top_k=_whole(given, "top_k", decode.top_k, least=0, most=2**31 - 1),
            top_p=top_p,
            seed=_whole(given, "seed", secrets.randbelow(SEEDS), least=-(2**63), most=2**63 - 1),
        ),
        n=n,
        max_tokens=bound[1] if row_tokens is None else None,
        row_tokens=row_tokens,
        echoed={
            **{name: given[name] for name, kind in ECHOED.items() if isinstance(given.get(name), kind)},
            "text": {"format": response_format.echo(given)},
            "max_output_tokens": bound[1],
            "truncation": "auto" if given.get("truncate") else "disabled",
        },
        logprobs=logprobs,
        stop=stop,
        stream=stream,
        include_usage=_flag(options, "include_usage"),
        rows=rows,
        unread=unread,
    )


ECHOED: dict[str, type] = {"instructions": str, "metadata": Mapping, "user": str, "safety_identifier": str}
ECHOED |= {"prompt_cache_key": str, "max_tool_calls": int}


def unknown_model(name: object, models: Mapping[str, Generator]) -> Refused:
    return unsuitable("model", name, " or ".join(map(repr, models)), status=404, code="model_not_found")


def _most_tokens(given: Object, names: tuple[str, ...]) -> tuple[str, int | None]:
    there = [name for name in names if name in given]
    if len(there) > 1:
        raise unsuitable(there[1], given[there[1]], f"none beside {there[0]}, which means the same")
    name = there[0] if there else names[0]
    return name, _whole(given, name, 0, least=1, most=2**20, otherwise="null for no bound") if there else None


def _sources(
    prompts: list[object], field: str, generator: Generator, *, truncate: bool
) -> tuple[tuple[Source, ...], int]:
    longest, cut, sources = generator.config.data.max_source, 0, []
    try:
        check_fields(fields_of(generator.config), prompts, field)
        for i, prompt in enumerate(prompts):
            place = f"{field} {i}" if len(prompts) > 1 else field
            for name in ("row_prefixes", "max_rows"):
                if isinstance(prompt, dict) and prompt.get(name):
                    raise UserError(f'{place}: found "{name}"; expected none, as it is for `pipejax decode` and Python')
            source = generator.source(prompt, place, i)
            ids: Sequence[int]
            if isinstance(source.content, str):
                assert generator.tokenizer is not None  # `source` saw to it
                ids = source_ids(source.content, generator.tokenizer, generator.architecture)
            else:
                ids = [int(token) for token in source.content]
            if len(ids) > longest and not truncate:
                expected = f"at most {longest}, or truncate: true to have the rest cut off"
                raise unsuitable(place, Shown(f"{len(ids)} tokens"), expected, code="context_length_exceeded")
            kept = cut_source(ids, longest)
            cut += len(ids) - len(kept)
            sources.append(source._replace(content=kept))
    except UserError as error:
        raise Refused(400, str(error), field=field) from error
    return tuple(sources), cut


KINDS = {str: "texts", dict: "objects", list: "lists", int: "numbers", float: "numbers", bool: "booleans"}


def _prompts(given: Object, field: str, config: Config) -> tuple[list[object], bool]:
    """One for each source: a text, an object or a list of ids."""
    prompt = given.get(field)
    expected = "a text, an object with the template's fields, a list of token ids, or a list of such prompts of a kind"
    if prompt is None:
        raise unsuitable("prompt", Shown("nothing"), expected)
    if isinstance(prompt, str | dict):
        return [prompt], False
    if not isinstance(prompt, list) or not prompt:
        raise unsuitable("prompt", prompt, expected)
    if all(isinstance(one, int | float) for one in prompt):  # ids, if they are whole
        return [prompt], False
    kinds = dict.fromkeys(KINDS.get(type(one), "null") for one in prompt)
    if len(kinds) > 1 or "null" in kinds:
        raise unsuitable("prompt", Shown(f"a list of {' and '.join(kinds)}"), expected)
    return prompt, False


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

COMPLETIONS = Form(
    read=_prompts,
    source="prompt",
    most_tokens=("max_tokens",),
    more=("n", "logprobs", "rows", "response_format"),
    neutral={"best_of": (1,), "echo": (False,), "suffix": ("",), **_PENALTIES},
    unused=("user",),
)
CHAT = Form(
    read=messages.last,
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
RESPONSES = Form(
    read=messages.last,
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
