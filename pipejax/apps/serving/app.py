"""The HTTP application: routes, API keys, limits, and errors as JSON."""

import asyncio
import contextlib
import dataclasses
import hmac
import importlib.resources
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, partial
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote, urlsplit

from pipejax import methods
from pipejax.apps.markup import STYLE
from pipejax.apps.serving import requests
from pipejax.apps.serving.answer import Closed
from pipejax.apps.serving.answering import Completion, refusal_for
from pipejax.apps.serving.connections import FRAMING
from pipejax.apps.serving.counters import CONTENT_TYPE, Counters
from pipejax.apps.serving.engine import Engine
from pipejax.apps.serving.example import example_of
from pipejax.apps.serving.refusals import Refused
from pipejax.apps.serving.requests import ClientRequest, RequestFields
from pipejax.apps.serving.responses import Chats, Completions, Objects, Responses, dump
from pipejax.apps.serving.turns import Share, Turns
from pipejax.inference.answer_format import Effort, Uncompiled
from pipejax.inference.generator import Generator
from pipejax.inference.sources import template_of
from pipejax.system.errors import UserError
from pipejax.system.extras import extra
from pipejax.system.fields import shown_value

with extra("serve", "pipejax serve"):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Seconds without an event after which a stream sends a comment, because proxies close silent connections.
SILENCE = 15.0
CHUNKS = 2**14  # the most bytes of chunk framing of a body, about 3,300 chunks, plus an eighth of its content
KEPT_BODY = 99_999  # the most unread bytes of a body with which the connection is kept open after the response
GONE = 499  # a status for counters only: the client has disconnected
READERS = 4  # threads that parse requests; new schemas are compiled in other threads
SHARES = {Effort.QUICK: 0.5, Effort.WHOLE: 0.5}  # the share of the interpreter's time that compiling schemas may take
WAITING = {Effort.QUICK: 64, Effort.WHOLE: 4}  # the most new schemas of a client that may wait to be compiled
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # the form of a client's request id
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a request."""

    body: int  # the most bytes of a body
    seconds: float  # the most seconds until the last byte of the response
    answers: int  # the most answers of one request
    schemas: bool = True  # whether requests may have schemas


# For each route: the fields of a request, and the class of its response objects.
POSTS: dict[str, tuple[RequestFields, type[Completions] | type[Responses]]] = {
    "/v1/completions": (requests.COMPLETIONS, Completions),
    "/v1/chat/completions": (requests.CHAT, Chats),
    "/v1/responses": (requests.RESPONSES, Responses),
}


class Service:
    """Answers requests with a generator, and keeps the state that all connections share."""

    def __init__(
        self,
        generator: Generator,
        engine: Engine,
        *,
        name: str,
        limits: Limits,
        keys: Sequence[str] = (),
        origins: Sequence[str] = (),
        hosts: Sequence[str] | None = None,
        access_log: bool = False,
    ) -> None:
        """Registers the counters. The service accepts requests as soon as `make_app` has made an application of it.

        Args:
          generator: the model.
          engine: decodes the requests.
          name: the model's name in the API.
          limits: the limits of each request.
          keys: API keys; empty: no key is required.
          origins: origins whose pages may use the API (CORS).
          hosts: names other than this machine's that a Host header may have; None: any name.
          access_log: whether to log each request.
        """
        self.models = {name: generator} | generator.adapters
        self.engine, self.name, self.limits = engine, name, limits
        self.keys, self.origins, self.hosts = [key.encode() for key in keys], origins, hosts
        self.access_log = access_log
        self.counters = Counters()
        self._readers = ThreadPoolExecutor(READERS, "reader")
        self._compiling = {effort: Turns("schema", most) for effort, most in WAITING.items()}
        self.active = 0  # requests for answers in progress
        self.draining = False
        self._warned_of_turns = False
        self.started = int(time.time())
        self._examples = cache(lambda name: example_of(self.models[name]))
        watch = self.counters.watch
        watch("active_requests", "Requests for answers in progress", lambda: self.active)
        watch("places", "Answers of a method that can be generated at the same time", lambda: engine.places)
        watch("places_in_use", "Answers that are being generated", lambda: engine.running)
        watch("queue_length", "Answers that wait for a place", lambda: engine.waiting)
        # Cached encodings are not counted here, because clients could see whether a text was requested before.
        watch("warming_up", "1 until all planned programs are compiled", lambda: not self.is_warm)
        watch("draining", "1 once the server has been asked to stop", lambda: self.draining)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status = time.perf_counter(), 500
        self.active += 1
        try:
            if self.draining:
                raise Closed
            body = await _body(Request(scope, receive), self.limits)
            form, made = POSTS[scope["path"]]
            reading = self._read(body, form, self._client_of(scope))
            wanted: ClientRequest = await _until_disconnect(reading, receive, begun + self.limits.seconds)
            if wanted.ignored_settings and not self._warned_of_turns:
                self._warned_of_turns = True
                said = "no system message and no earlier turn (logged once)"
                logger.warning(f"the model reads only the last user message of a conversation, {said}")
            generator = self.models[wanted.model]
            completion = Completion(wanted, generator, self.engine, self.counters)
            objects = made(completion, model=wanted.model, fingerprint=generator.origin.get("params_fp"))
            try:
                if wanted.stream:
                    await _stream(completion, objects, receive, send, ends=begun + self.limits.seconds)
                else:
                    await _until_disconnect(completion.finish(SILENCE), receive, begun + self.limits.seconds)
                    await _json(objects.whole())(scope, receive, send)
                status = 200
            finally:
                completion.close()
        except ClientDisconnect:
            status = GONE
        except Exception as error:
            status = refusal_for(error).status
            await refusal(error)(scope, receive, send)
        finally:
            self.active -= 1
            self.counters.requests.labels(str(status)).inc()
            if status == 200:
                self.counters.seconds.observe(time.perf_counter() - begun)

    @property
    def is_warm(self) -> bool:
        """Whether all planned programs are compiled."""
        return self.engine.compiler.prepared >= self.engine.compiler.planned

    async def _read(self, body: bytes, form: RequestFields, client: Hashable) -> ClientRequest:
        """Parses a request. One thread compiles new schemas; another thread compiles the schemas that take long."""
        run, limits = asyncio.get_running_loop().run_in_executor, self.limits
        given = await run(self._readers, requests.parse_body, body)

        def read(effort: Effort | None) -> ClientRequest:
            pause = Share(SHARES[effort]) if effort else None

            def apply(schema: Mapping[str, object], generator: Generator, method: str) -> Generator:
                return generator.under(schema, method, effort=effort, pause=pause)

            apply_schema = apply if limits.schemas else None
            return requests.read_request(given, form, self.models, most=limits.answers, apply=apply_schema)

        with contextlib.suppress(Uncompiled):
            return await run(self._readers, read, None)
        with contextlib.suppress(Uncompiled):
            return await asyncio.wrap_future(self._compiling[Effort.QUICK].submit(client, partial(read, Effort.QUICK)))
        return await asyncio.wrap_future(self._compiling[Effort.WHOLE].submit(client, partial(read, Effort.WHOLE)))

    def _client_of(self, scope: Scope) -> Hashable:
        """Identifies the sender of a request: by its key, or by its address if no key is required."""
        if self.keys:
            return header_of(scope, b"authorization")
        return (scope.get("client") or ("",))[0]

    async def show_models(self, request: Request) -> Response:
        """Answers GET /v1/models and /v1/models/NAME."""
        name = request.path_params.get("name")
        if name is None:
            return _json({"object": "list", "data": [self._describe_model(each) for each in self.models]})
        if name not in self.models:
            raise requests.unknown_model(name, self.models)
        return _json(self._describe_model(name))

    def _describe_model(self, name: str) -> dict[str, object]:
        """Returns the description of a model for /v1/models."""
        generator = self.models[name]
        config, template = generator.config, template_of(generator.config)
        ids, served = generator.ids, methods.methods_with(config, "serve")
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "pipejax",
            "methods": [*served],
            "default_method": generator.default_method,
            "strategies": [*served],  # the former names of these two fields, until the next release
            "default_strategy": generator.default_method,
            "delays": {name: int(method.strategy(ids).start(1)) for name, method in served.items()},
            "max_prompt_tokens": config.data.max_source,
            "step": generator.origin.get("step"),
            "template": template.text,
            "fields": [*dict.fromkeys(template.fields)],
            "has_tokenizer": generator.tokenizer is not None,
            "example": self._examples(name),
        }

    async def health(self, request: Request) -> Response:
        """Answers GET /health."""
        return _json({"status": "draining" if self.draining else "ok"}, 503 if self.draining else 200)

    async def live(self, request: Request) -> Response:
        """Answers GET /livez: the process runs."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Answers GET /readyz: 200 once all planned programs are compiled, 503 before that and while draining."""
        status = "draining" if self.draining else "ok" if self.is_warm else "warming up"
        found = {"prepared": self.engine.compiler.prepared, "planned": self.engine.compiler.planned}
        return _json({"status": status, "programs": found}, 200 if status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        """Answers GET /metrics in the format of Prometheus."""
        return Response(self.counters.text(), media_type=CONTENT_TYPE)


def make_app(service: Service) -> ASGIApp:
    """Returns the ASGI application with all routes, the checks of hosts and keys, and JSON errors."""
    page = importlib.resources.files("pipejax.apps.serving").joinpath("page.html").read_text(encoding="utf-8")
    page = page.replace("/* the style of every page */", STYLE)
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            found, headers = f"{request.method} {request.url.path}", dict(error.headers or {})
            if "Allow" in headers:  # the path exists, for other methods
                headers["Allow"] = ", ".join(sorted([*headers["Allow"].split(", "), "OPTIONS"]))
                if request.method == "OPTIONS":
                    return Response(status_code=204, headers=headers)
            said = f"found {found[:80]}; expected one of {', '.join(ROUTES)}"
            error = Refused(error.status_code, said, headers=headers)
        return refusal(error)

    routes = [
        Route("/", show),
        *(Route(path, service, methods=["POST"]) for path in POSTS),
        Route("/v1/models", service.show_models),
        Route("/v1/models/{name:path}", service.show_models),
        Route("/health", service.health),
        Route("/livez", service.live),
        Route("/readyz", service.ready),
        Route("/metrics", service.metrics),
    ]
    handlers = {HTTPException: refuse, Refused: refuse, Exception: refuse}
    middleware = [Middleware(_KeyCheck, keys=service.keys)]
    if service.origins:  # before `_KeyCheck`, because browsers send preflight requests without a key
        # The permissions of pages from other sites. Any header is allowed, because clients send many.
        sites = Middleware(
            CORSMiddleware,
            allow_origins=service.origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After", "X-Should-Retry", "X-Request-Id"),
        )
        middleware.insert(0, sites)
    if service.hosts is not None:
        middleware.insert(0, Middleware(_HostCheck, names=service.hosts))
    made = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    made.router.redirect_slashes = False  # a redirect would lead to the host named in the request
    return _RequestIds(made, service)


PROBES = "/health", "/livez", "/readyz", "/metrics", "/"
ROUTES = (*(f"POST {path}" for path in POSTS), "GET /v1/models", *(f"GET {path}" for path in PROBES))
_request_id = ContextVar("request_id", default="")  # the id of the current request


class _RequestIds:
    """Assigns an id to each request: the client's id or a new one. The response and the log contain the id.

    The connection is closed after the response in three cases: the server drains; the request has a length as well as
    chunks, so that a proxy may have found another end of the body (RFC 9112, 6.1); or most of the body was not read.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = header_of(scope, b"x-request-id").decode("latin-1")
        own = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        status, begun = GONE, time.perf_counter()
        length, chunked = (header_of(scope, name) for name in (b"content-length", b"transfer-encoding"))
        is_long = bool(chunked) or len(length) > len(str(KEPT_BODY))
        is_read = False

        async def read() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body")
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message["headers"], (b"x-request-id", own.encode())]
                ends = self._service.draining or bool(length and chunked) or (is_long and not is_read)
                if ends and (b"connection", b"close") not in headers:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        _request_id.set(own)
        try:
            await self._app(scope, read, answer)
        finally:
            if self._service.access_log:
                seconds, path = time.perf_counter() - begun, quote(scope["path"])[:200]
                fields = {"request": own, "method": scope["method"], "path": path, "status": status, "seconds": seconds}
                said = "{method} {path} {status} in {seconds:.3f} s, request {request}"
                logger.info(said.format(**fields), extra={"fields": fields})


class _HostCheck:
    """Refuses requests whose Host header does not name this machine or an allowed host.

    A malicious site can make its own name resolve to this machine (DNS rebinding). A browser then treats the server as
    part of that site; only the Host header of its requests shows the difference.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app, self._names = app, {name.lower().rstrip(".") for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        app = self._app
        if given and not self._is_known(host_of(given[0])):  # browsers always send a Host; HTTP/1.0 clients may not
            expected = "localhost, a loopback address or a name given with --allow-host"
            message = f"Host: found {shown_value(given[0])}; expected {expected}"
            app = refusal(Refused(421, message, code="unknown_host"))
        await app(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        if "*" in self._names or host in self._names or host == "localhost" or host.endswith(".localhost"):
            return True
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            return (getattr(address, "ipv4_mapped", None) or address).is_loopback
        return False


def header_of(scope: Scope, name: bytes) -> bytes:
    """Returns the first header with a name in lower case; b"" if there is no such header."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def host_of(text: str) -> str:
    """Returns the name or address in a Host header, without the port; "" if the header has no valid host."""
    try:
        parts = urlsplit(f"//{text}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "").rstrip(".") if parts.netloc == text and "@" not in text else ""


class _KeyCheck:
    """Requires an API key for paths that begin with /v1/, if there are keys. OPTIONS needs no key."""

    def __init__(self, app: ASGIApp, keys: Sequence[bytes]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        is_question = scope["type"] == "http" and scope["method"] != "OPTIONS"
        if is_question and scope["path"].startswith("/v1/") and self._keys:
            given = header_of(scope, b"authorization")
            kind, _, key = given.partition(b" ")
            known = [hmac.compare_digest(key.strip(), other) for other in self._keys]
            if kind.lower() != b"bearer" or not any(known):
                found = "another key" if given else "no key"
                message = f"Authorization: found {found}; expected Bearer and a key of this server"
                headers = {"WWW-Authenticate": "Bearer"}
                app = refusal(Refused(401, message, code="invalid_api_key", headers=headers))
        await app(scope, receive, send)


async def _body(request: Request, limits: Limits) -> bytes:
    """Reads the body of a request.

    Raises:
      Refused: the type, size, chunks or duration of the body are not allowed.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages of other sites can send other types without a preflight request
        raise Refused(415, UserError("Content-Type", found=kind[:80] or "none", expected="application/json"))
    if (packed := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise Refused(415, UserError("Content-Encoding", found=packed[:80], expected="none"))
    excess = UserError("body", found=f"more than {limits.body} bytes", expected="at most that many")
    large = Refused(413, excess, code="body_too_large", headers={"Connection": "close"})
    declared = request.headers.get("content-length", "0")
    if len(declared) > 18 or int(declared) > limits.body:
        raise large
    body, state = bytearray(), request.scope.get("state", {})
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    raise large
                if state.get(FRAMING, 0) > CHUNKS + len(body) // 8:
                    small = UserError(
                        "body", found="chunks of very few bytes", expected="larger ones, or a Content-Length"
                    )
                    raise Refused(400, small, code="chunks_too_small", headers={"Connection": "close"})
    except TimeoutError as error:
        late = UserError(
            "body", found=f"no end after {limits.seconds:g} s", expected="the complete body within this time"
        )
        raise Refused(408, late, headers={"Connection": "close"}) from error
    return bytes(body)


async def _stream(completion: Completion, objects: Objects, receive: Receive, send: Send, *, ends: float) -> None:
    """Sends a completion as server-sent events while decoding continues. An error becomes the last event."""

    async def say(*events: str, more: bool = True) -> None:
        body = "".join(f"{event}\n\n" for event in events).encode("utf-8", "replace")
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def write() -> None:
        await say(*objects.begin())
        async for added in completion.run(SILENCE):
            if events := objects.add(added):
                await say(*events)
            elif not added:
                await say(": waiting")
        await say(*objects.end(), more=False)

    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
    headers += [(b"x-accel-buffering", b"no")]  # else nginx would buffer the events
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        await _until_disconnect(write(), receive, ends)
    except ClientDisconnect:
        raise
    except Exception as error:
        completion.close("error")
        with contextlib.suppress(TimeoutError):  # a client that does not read cannot get the error either
            async with asyncio.timeout(5):
                await say(*objects.fail(_refuse_and_log(error)), more=False)


async def _until_disconnect(work: Awaitable[Result], receive: Receive, ends: float) -> Result:
    """Awaits the work until the client disconnects or the time is over.

    Raises:
      ClientDisconnect: the client has disconnected.
      Refused: the time is over.
    """

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    begun = time.perf_counter()
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait(tasks, timeout=max(ends - begun, 0), return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if tasks[1].done() and not tasks[1].cancelled():
        raise ClientDisconnect
    raise Refused(
        504, "the request took longer than the server allows", code="timeout", headers={"x-should-retry": "false"}
    )


def _refuse_and_log(error: Exception) -> Refused:
    """Returns the response for an exception; logs the traceback if the exception is an error of the server."""
    refused = refusal_for(error)
    if refused.status == 500:
        own = _request_id.get()
        told_of = {"fields": {"request": own}}
        logger.error(f"request {own} failed because of an error in the server", extra=told_of, exc_info=error)
    return refused


def refusal(error: Exception) -> Response:
    """Returns the HTTP response for an exception."""
    refused = _refuse_and_log(error)
    return _json(refused.body(), refused.status, refused.headers)


MALFORMED = "request: found no valid request; expected HTTP/1.1 without TLS, with at most 64 KiB before the body"
# The responses on connections without a readable request, by reason.
WITHOUT_REQUEST = {
    "malformed": Refused(400, MALFORMED, code="malformed_request"),
    "full": Refused(503, "too many connections are open; try again", code="too_many_connections"),
}


def refuse_connection(reason: str, *, access_log: bool) -> bytes:
    """Returns the bytes of the response, with an id, on a connection without a readable request.

    `reason` is a key of WITHOUT_REQUEST.
    """
    refused, own = WITHOUT_REQUEST[reason], secrets.token_hex(16)
    body = dump(refused.body()).encode()
    head = [f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}", "Content-Type: application/json"]
    head += [f"Content-Length: {len(body)}", "Connection: close", f"X-Request-Id: {own}", "", ""]
    if access_log:
        fields = {"request": own, "status": refused.status}
        logger.info("{status} without a request, {request}".format(**fields), extra={"fields": fields})
    return "\r\n".join(head).encode() + body


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = dump(content).encode("utf-8", "replace")
    return Response(body, status, headers, media_type="application/json")
