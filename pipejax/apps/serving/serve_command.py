"""Answers requests over HTTP with a trained or converted checkpoint: OpenAI's completions, chats and responses.

    pipejax serve --checkpoint runs/demo [--port 8000] [--api-key-file FILE] [--set ...]

http://HOST:PORT/ is a page on which you can try the server. The first SIGTERM or Ctrl-C ends the server gracefully:
requests in progress are completed within --drain seconds, and new requests are refused. A second signal ends the server
at once. API keys are in the file or in $PIPEJAX_API_KEY, one per line; without keys, anyone who can reach the port can
use the server. The server has no TLS: put a proxy in front of it.
"""

import argparse
import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.extras import extra
from pipejax.system.files import absolute
from pipejax.system.progress import Progress

if TYPE_CHECKING:
    from pipejax.apps.serving.app import Service

logger = logging.getLogger(__name__)

KEY = "PIPEJAX_API_KEY"
LEVELS = "debug", "info", "warning", "error"
PORTS = {"http": 80, "https": 443}  # default ports, which an origin does not contain
CONNECTIONS = 4096  # the default limit of open connections
FILES = 160  # files that the server may open in addition to its connections
GRACE = 1.0  # seconds at shutdown in which requests on open connections are refused instead of dropped
OTHERS = "uvicorn", "asyncio", "py.warnings"  # loggers of libraries whose lines are written like the server's
NAME = re.compile("[A-Za-z0-9._-]+")  # a host name; international names have the ASCII form that browsers send
MARK = "\ufeff"  # the byte order mark at the beginning of a file


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax serve", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all (default: %(default)s)"
    )
    parser.add_number(
        "--port", "port to listen on; 0 picks a free port (default: %(default)s)", least=0, most=65535, default=8000
    )
    parser.add_argument("--name", help="name of the model for clients (default: the name of DIR)")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="a LoRA run of this checkpoint, or a PEFT directory; answers requests for the model NAME (repeatable)",
    )
    parser.add_number(
        "--places",
        "number of answers per method that are decoded at once (default: %(default)s)",
        most=2**12,
        default=8,
    )
    parser.add_number(
        "--queue", "maximum number of waiting answers (default: %(default)s)", least=0, most=2**16, default=64
    )
    parser.add_number(
        "--encoding-cache",
        "number of recent sources whose encoding is cached; 0 disables the cache (default: %(default)s)",
        least=0,
        most=2**16,
        default=16,
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help=f"file with one API key per line (default: ${KEY}, if it is set)"
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        type=origin,
        default=[],
        metavar="ORIGIN",
        help="origin whose pages may send requests, such as https://app.example; * allows all "
        "(repeatable; default: only the server's own)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        type=host_name,
        default=[],
        metavar="NAME",
        help="an additional host name that is allowed in the Host header of requests; * allows all "
        "(repeatable; default: all with a key, or if other machines can reach the port; else "
        "--host)",
    )

    def seconds(flag: str, text: str, default: int | None, least: int = 1) -> None:
        parser.add_argument(flag, type=cli.whole_number(least, 86400), default=default, metavar="S", help=text)

    number = "maximum number of open connections (default: as many as `ulimit -n` allows, at most 4096)"
    parser.add_number("--connections", number, least=1, most=2**20, default=None)
    parser.add_number("--max-body", "maximum bytes of a request (default: %(default)s)", most=2**30, default=2**20)
    seconds("--timeout", "seconds for a request (default: %(default)s)", 300)
    seconds("--keep-alive", "seconds that an idle connection stays open (default: %(default)s)", 75)
    seconds("--drain", "seconds to finish running requests at shutdown (default: --timeout)", None, least=0)
    ahead = "compile at startup for prompts of up to N tokens; 0 disables it (default: data.max_source)"
    parser.add_number("--warm-up", ahead, least=0, most=2**16)
    parser.add_argument(
        "--access-log", action="store_true", help="log one line per request, without prompts and answers"
    )
    parser.add_argument(
        "--log-level", choices=LEVELS, default="info", help="minimum level of logged lines (default: info)"
    )
    parser.add_argument("--log-json", action="store_true", help="write each line to standard error as a JSON object")
    parser.add_argument("--no-schemas", action="store_true", help="refuse every response_format except text")
    parser.add_overrides("override a setting of grid or decode, data.max_source or data.separator (repeatable)")
    flags = parser.parse_args(argv)
    logging.getLogger("pipejax").setLevel(flags.log_level.upper())
    if flags.log_json:
        cli.write_json()
        logging.captureWarnings(True)

    with extra("serve", "pipejax serve"):
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401

    with ending_on_sigterm(), cli.adopted(*OTHERS):
        return start(flags)


def start(flags: argparse.Namespace) -> int:
    """Loads the checkpoint, starts the engine and serves; returns the exit code."""
    keys, name = read_keys(flags.api_key_file), flags.name or absolute(flags.checkpoint).name
    adapters = read_adapters(flags.adapter, name)
    connections = most_connections(flags.connections)
    listener = listen(flags.host, flags.port)
    is_guarded = flags.allow_host or (not keys and is_local(listener.getsockname()[0]))
    from pipejax.apps.serving.app import Limits, Service
    from pipejax.apps.serving.engine import Engine
    from pipejax.inference.loading import load  # imports JAX, so this line follows the checks of flags and port

    generator = load(flags.checkpoint, best=flags.best, overrides=flags.overrides, adapters=adapters)
    if (samples := generator.config.decode.samples) > 1:
        logger.warning(f"decode.samples: found {samples}; requests are answered once, or as often as their n")
    # Schemas are compiled in Python, and the engine needs the interpreter many times per step. The default switch
    # interval would cost 5 ms each time.
    sys.setswitchinterval(0.0005)
    engine = Engine(generator, places=flags.places, queue=flags.queue, encodings=flags.encoding_cache)
    service = Service(
        generator,
        engine,
        name=name,
        limits=Limits(flags.max_body, flags.timeout, flags.places + flags.queue, schemas=not flags.no_schemas),
        keys=keys,
        origins=flags.allow_origin,
        hosts=[*flags.allow_host, flags.host] if is_guarded else None,
        access_log=flags.access_log,
    )
    longest = generator.config.data.max_source
    try:
        if length := longest if flags.warm_up is None else min(flags.warm_up, longest):
            engine.warm_up(length, schemas=not flags.no_schemas)
            then = "sampling and scores" if flags.no_schemas else "sampling, scores and schemas"
            logger.info(
                f"compiling for prompts of up to {length} tokens, then for {then}: a request is answered as soon as "
                "its programs are compiled, and /readyz reports when the programs of ordinary requests are; with "
                "--warm-up 0 the first requests start the compilation"
            )
        drain = flags.timeout if flags.drain is None else flags.drain
        shown = not flags.log_json and logger.isEnabledFor(logging.INFO)
        run(service, listener, connections=connections, keep_alive=flags.keep_alive, drain=drain, shown=shown)
    finally:
        engine.close(drain=False, seconds=5.0)
    return 0


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Returns a context manager in which SIGTERM ends the process with one line.

    The running server replaces this handler.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        logger.info("stopped by SIGTERM before the server had started")
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def origin(text: str) -> str:
    """Checks a page's origin; an argparse type.

    The origin must have the spelling that browsers send, because another spelling would never match.
    """
    try:
        parts = urlsplit(text.strip().lower())
        port = "" if parts.port in (None, PORTS.get(parts.scheme)) else f":{parts.port}"
    except ValueError:  # an invalid port
        parts, port = urlsplit(""), ""
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    spelt = f"{parts.scheme}://{host}{port}" if parts.scheme and host and text.isascii() else "https://app.example"
    if text not in ("*", spelt):
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected an origin as browsers send it, such as {spelt}, or *"
        )
    return text


def host_name(text: str) -> str:
    """Parses a host name without a scheme, a port or a path; an argparse type."""
    address = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if text == "*" or NAME.fullmatch(text):
        return text
    try:
        return str(ipaddress.ip_address(address))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected a name or an address without a port, or *"
        ) from error


def is_local(address: str) -> bool:
    """Returns whether an address can be reached only from this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def most_connections(given: int | None) -> int:
    """Returns the limit of open connections: `given`, or by default the number that the limit of open files allows.

    The default is at most CONNECTIONS.
    Each connection needs a file descriptor, so the function raises the process's limit of open files if necessary.

    Raises:
      UserError: the limit of open files is too low for the connections, and cannot be raised.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (given or 1) + FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed and (most == resource.RLIM_INFINITY or most >= needed):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
            allowed = needed
    if allowed == resource.RLIM_INFINITY:
        return given or CONNECTIONS
    if allowed < needed:
        raise UserError(
            f"--connections {given}" if given else "pipejax serve",
            found=f"a limit of {allowed} open files (ulimit -n)",
            expected=f"at least {needed}",
        )
    return given or min(CONNECTIONS, allowed - FILES)


def read_keys(path: str | None) -> list[str]:
    """Returns the API keys; an empty list means that no key is required.

    Raises:
      UserError: the file cannot be read, or a key is invalid.
    """
    place, text = f"${KEY}", os.environ.get(KEY)
    if path is not None:
        place = f"--api-key-file {path}"
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
            raise UserError(place, f"cannot be read ({reason})") from error
    if text is None:
        return []
    lines = [line.strip().removeprefix(MARK) for line in text.splitlines()]  # concatenated files have several marks
    if strange := next((i for i, line in enumerate(lines, 1) if not line.isprintable()), None):
        raise UserError(f"{place}: line {strange}", found="an invisible character", expected="a key")
    if not any(lines):
        raise UserError(place, found="no key", expected="one key per line")
    return [line for line in lines if line]


def read_adapters(given: Sequence[str], base: str) -> dict[str, str]:
    """Returns the directories of adapters by name, from the texts NAME=DIR of --adapter.

    Raises:
      UserError: a text has another form, or a name is used twice.
    """
    found = dict[str, str]()
    for one in given:
        name, _, directory = one.partition("=")
        if not name or not directory:
            raise UserError("--adapter", found=f"{one!r}", expected="NAME=DIR")
        if name in (base, *found):
            raise UserError(f"--adapter {one}", found=f"the name {name} twice", expected="different names")
        found[name] = directory
    return found


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to the address.

    Raises:
      UserError: the address is unknown or in use.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host}", found="an address that this machine does not have", expected="an address of this machine"
        ) from error
    # asyncio disables Nagle's algorithm only for sockets with an explicit protocol; else responses would be delayed by
    # 40 ms.
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"--host {host} --port {port}", f"cannot listen there ({error.strerror})") from error
    return listener


def run(
    service: "Service",
    listener: socket.socket,
    *,
    connections: int = CONNECTIONS,
    keep_alive: int = 75,
    drain: float = 300,
    shown: bool = True,
) -> None:
    """Serves until a signal ends the server and all requests are answered, or `drain` seconds have passed.

    Args:
      service: the application's service.
      listener: the listening socket.
      connections: the limit of open connections.
      keep_alive: seconds until an idle connection is closed.
      drain: the most seconds for requests in progress after the first signal.
      shown: whether to log the server's address and its end.
    """
    with extra("serve", "pipejax serve"):
        import uvicorn
    from pipejax.apps.serving.app import make_app, refuse_connection
    from pipejax.apps.serving.connections import Connection, Listener

    class Server(uvicorn.Server):
        """A server whose first signal starts draining: clients get an error response instead of no connection."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if service.draining:
                self.should_exit = self.force_exit = True
            service.draining = True

    host, port = listener.getsockname()[:2]
    if not service.keys and not is_local(host):
        logger.warning("no API key is set: anyone who can reach this port may use the server")
    if not service.keys and "*" in service.origins:
        logger.warning(
            "--allow-origin * and no API key: any page in a browser that reaches this port may use the server"
        )
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    ours = {"http": Connection, "ws": "none", "log_config": None, "log_level": "error", "access_log": False}
    ours |= {"lifespan": "off", "server_header": False, "timeout_keep_alive": keep_alive}
    server = Server(uvicorn.Config(make_app(service), **ours))  # type: ignore[arg-type]
    refusal = functools.partial(refuse_connection, access_log=service.access_log)
    accepting = Listener(listener, server, connections, refusal)

    async def serve() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[]))
        while not (serving.done() or server.started):
            await asyncio.sleep(0.01)
        acceptor = asyncio.ensure_future(accepting.accept())
        logger.info(f"serving {service.name} at {where}")
        compiler, ends = service.engine.compiler, float("inf")
        is_warm = service.is_warm
        progress = Progress("compiling", compiler.planned, unit="program", shown=shown and not is_warm)
        while not serving.done() and (service.active or not service.draining):
            await asyncio.sleep(0.1)
            progress.total = compiler.planned
            if (more := compiler.prepared - progress.count) and not is_warm:
                progress.add(more)
            if service.is_warm and not is_warm:
                is_warm = True
                progress.close()
                logger.info("ready: ordinary requests need no compilation; lone ones, long answers and schemas follow")
            ends = min(ends, time.monotonic() + drain) if service.draining else ends
            if time.monotonic() >= ends:
                logger.warning(f"{service.active} requests are not finished after {drain:g} s; they get status 503")
                await asyncio.to_thread(service.engine.close, drain=False, seconds=0.0)
                break
        progress.close()
        await accepting.stop()
        acceptor.cancel()
        accepting.close()
        if not server.force_exit:
            await accepting.wait_until_closed(GRACE)
        server.force_exit |= time.monotonic() >= ends
        server.should_exit = True
        await serving

    asyncio.run(serve())
    logger.info("stopped")
