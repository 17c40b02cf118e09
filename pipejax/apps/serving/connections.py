"""Connections of the HTTP server: limits their number and work, and closes connections without losing responses.

`Listener` accepts connections up to a limit; at the limit it closes an idle connection or refuses the new one.
`Connection` is uvicorn's HTTP/1.1 protocol that parses a bounded number of bytes at a time, so that one client cannot
block the event loop. `_Transport` delays closing a socket until the client has read its response.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import socket
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pipejax.system.extras import extra

with extra("serve", "pipejax serve"):
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

READ = 2**12  # bytes of one connection that are parsed before other connections are served
DISCARDED = 2**26  # bytes that are read and discarded after a response
# Seconds without a byte, and seconds in total, after which a connection that discards input is closed.
SILENCE, LONGEST = 1.0, 30.0
FRAMING = "pipejax.framing"  # key of a request's state: bytes of chunk framing in its body
BACKLOG = 2048  # the system's backlog of connections to accept
BATCH = 32  # connections that are accepted before other tasks run
SPARE = 32  # connections above the limit that may be refused at the same time
PAUSE = 0.05  # seconds until `Listener` tries or looks again, and until connection requests become connections
QUIET = 60.0  # seconds between two log lines about the limit
ATTACH_FILTER = 26  # Linux: SO_ATTACH_FILTER
# A classic BPF program that drops the packets which request a connection. It reads the TCP header. Each instruction is
# (code, instructions to skip if true, instructions to skip if false, operand).
DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte of flags
    (0x54, 0, 0, 0x12),  # keep the bits of SYN and ACK
    (0x15, 0, 1, 0x02),  # whether only SYN is set
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # keep the packet
)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """The HTTP/1.1 protocol of one client.

    A `BufferedProtocol` determines how many bytes are read, and thereby parsed, at a time.
    """

    def __init__(self, listener: "Listener", **given: Any) -> None:
        super().__init__(**given)
        self._listener, self._buffer = listener, bytearray(READ)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wraps the transport; refuses the connection if the limit is reached."""
        super().connection_made(_Transport(transport, self.loop))  # type: ignore[arg-type]
        if not self._listener.admit(self):
            self._refuse("full")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the listener that the connection is closed."""
        self._listener.forget(self)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Returns the buffer of READ bytes into which the loop reads."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parses the bytes that were read, and counts the bytes of chunk framing among these bytes."""
        if self.transport.discard(nbytes):  # type: ignore[attr-defined]
            return
        cycle = self.cycle
        before = len(cycle.body) if cycle is not None else 0
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))
        if self.cycle is None:
            return
        if self.cycle is cycle:
            self.scope["state"][FRAMING] = self.scope["state"].get(FRAMING, 0) + nbytes - (len(cycle.body) - before)
        if not (self.cycle.more_body or self.cycle.response_complete):
            self._listener.idle.pop(self, None)

    def on_response_complete(self) -> None:
        """Marks the connection as idle. A closing connection becomes the first one to be closed at the limit."""
        super().on_response_complete()
        self._listener.idle[self] = None
        self._listener.idle.move_to_end(self, last=not self.transport.is_closing())

    def send_400_response(self, msg: str) -> None:
        """Responds to bytes that are not a request; called by uvicorn."""
        self._refuse("malformed")

    def _refuse(self, reason: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            # Otherwise the refusal would be written into the response in progress.
            self.transport.write(self._listener.refusal(reason))
        if self.cycle is not None:  # the task of the request is not needed any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Does nothing: a client that requests HTTP/2 or a WebSocket gets an HTTP/1.1 response."""


class _Transport:
    """A transport that closes gracefully: it sends all responses, then discards input until the client closes.

    Closing a socket with unread input resets the connection, and the client may lose the response.
    """

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._loop = inner, loop
        self._left, self._discards = DISCARDED, False
        self._heard = self._ends = 0.0  # times of the event loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_closing(self) -> bool:
        """Returns whether the connection is closing, including the time in which it discards input."""
        return self._discards or self._inner.is_closing()

    def write(self, data: bytes) -> None:
        """Writes bytes, unless the connection is closing."""
        if not self._discards:
            self._inner.write(data)

    def close(self) -> None:
        """Begins to discard input until the client closes the connection or a time limit is reached."""
        if self.is_closing():
            return
        self._discards, self._heard = True, self._loop.time()
        self._ends = self._heard + LONGEST
        self._inner.write_eof()
        self._inner.resume_reading()
        self._watch()

    def discard(self, count: int) -> bool:
        """Counts incoming bytes; returns whether to discard these bytes."""
        if self._discards:
            self._left, self._heard = self._left - count, self._loop.time()
            if self._left < 0:
                self._inner.abort()
        return self._discards

    def _watch(self) -> None:
        """Closes the connection after SILENCE seconds without input, and aborts it after LONGEST seconds."""
        if self._inner.is_closing():
            return
        now, unsent = self._loop.time(), self._inner.get_write_buffer_size()
        if now >= self._ends:
            self._inner.abort()
        elif now >= self._heard + SILENCE and not unsent:
            self._inner.close()
        else:
            self._loop.call_later(SILENCE / 4, self._watch)


class Listener:
    """Accepts connections. At the limit it closes the connection that has been idle longest, or refuses the new one."""

    def __init__(
        self, listener: socket.socket, server: uvicorn.Server, most: int, refusal: Callable[[str], bytes]
    ) -> None:
        """Prepares accepting on a socket.

        Args:
          listener: the listening socket.
          server: the server that the connections belong to.
          most: the limit of open connections.
          refusal: returns the response to a connection without a request, for the reason "malformed" (the bytes are not
            a request) or "full" (the limit is reached).
        """
        self._socket, self._server, self.most, self.refusal = listener, server, most, refusal
        self.idle = OrderedDict[Connection, None]()  # connections without a complete request, longest idle first
        self._open = set[Connection]()
        self._connecting = set[asyncio.Task[object]]()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._warned = float("-inf")

    def admit(self, connection: Connection) -> bool:
        """Closes idle connections, if necessary, to make room for a new one; returns whether there is room."""
        self._open.add(connection)
        if len(self._open) > self.most:
            self._warn(
                f"{self.most} connections are open, which is the limit (--connections, ulimit -n): each new one "
                "replaces the one that has been idle longest, or is refused"
            )
            while self.idle and len(self._open) > self.most:
                self._close_idle()
        self.idle[connection] = None
        return len(self._open) <= self.most

    def forget(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self.idle.pop(connection, None)
        self._open.discard(connection)

    async def accept(self) -> None:
        """Accepts connections until the task is cancelled. Called after the server has started."""
        loop, number = asyncio.get_running_loop(), 0
        while True:
            number += 1
            if number % BATCH == 0:
                await asyncio.sleep(0)
            if len(self._open) + len(self._connecting) >= self.most + SPARE:
                await asyncio.sleep(PAUSE)
                continue
            try:
                client, _ = await loop.sock_accept(self._socket)
            except ConnectionError:  # the client is gone
                continue
            except OSError as error:  # no file descriptor or no memory is left
                self._warn(f"no connection can be accepted now ({error.strerror})")
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._close_idle()
                await asyncio.sleep(PAUSE)
                continue
            self._connect(client)

    async def stop(self) -> bool:
        """Ignores new connection requests, and waits PAUSE seconds, in which the present ones become connections.

        A client repeats an ignored request after a second, and the repeated request is refused if the socket is closed
        by then. Where requests cannot be ignored, `close` may reset one connection.

        Returns:
          Whether requests are ignored. This needs Linux, and some sandboxes under Linux have no packet filters.
        """
        ignores = False
        if sys.platform == "linux":
            code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in DROP_SYN))
            program = struct.pack("HP", len(DROP_SYN), ctypes.addressof(code))
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)
                ignores = True
        await asyncio.sleep(PAUSE)
        return ignores

    def close(self) -> None:
        """Accepts the connections in the backlog, and no more. Called after `stop`, when `accept` was cancelled.

        Closing the socket resets connections that were not accepted. Where `stop` cannot ignore requests, at most one
        connection is reset, since the backlog is 0 by then.
        """
        self._socket.listen(0)
        try:
            while True:
                self._connect(self._socket.accept()[0])
        except OSError:  # the backlog is empty
            pass
        self._socket.close()

    async def wait_until_closed(self, seconds: float) -> None:
        """Waits until the clients have closed all connections, for at most the given number of seconds."""
        ends = time.monotonic() + seconds
        while (self._open or self._connecting) and time.monotonic() < ends:
            await asyncio.sleep(PAUSE)

    def _connect(self, client: socket.socket) -> None:
        made = Connection(self, config=self._server.config, server_state=self._server.server_state, app_state={})
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        task: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(lambda: made, client))
        self._connecting.add(task)  # the loop keeps only a weak reference
        task.add_done_callback(self._connecting.discard)

    def _close_idle(self) -> None:
        if self.idle:
            connection = next(iter(self.idle))
            self.forget(connection)
            connection.transport.abort()

    def _warn(self, line: str) -> None:
        if time.monotonic() >= self._warned + QUIET:
            self._warned = time.monotonic()
            logger.warning(line)
