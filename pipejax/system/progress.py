"""Shows the progress of long work on standard error: a bar on a terminal, else a line from time to time."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_bars: list[Any] = []  # bars on the screen


def say(text: str) -> None:
    """Writes a line to standard error, above a bar if one is shown."""
    if _bars:
        _bars[-1].write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr, flush=True)


class Progress:
    """Counts units of work up to a total, and shows the count."""

    def __init__(
        self, what: str, total: int | None, *, unit: str, start: int = 0, every: float = 15.0, shown: bool = True
    ) -> None:
        """Shows a bar if standard error is a terminal, else a line every `every` seconds.

        Args:
          what: the name of the work.
          total: the number of units; None: unknown.
          unit: the name of a unit, in the singular.
          start: units already done.
          every: seconds between two lines.
          shown: whether to show anything.
        """
        self.shown, self.note = shown, ""
        self.what, self.total, self.unit, self.count, self.every = what, total, unit, start, every
        self.is_first, self._took = True, dict[str, float]()
        self.said = time.monotonic()
        self.begun, self.begun_count = self.said, start  # the start of the interval for rates: time and count
        self.bar: Any = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            options = {"desc": what, "unit": unit, "file": sys.stderr, "leave": False, "dynamic_ncols": True}
            size = os.get_terminal_size(sys.stderr.fileno())
            if not all(size):  # the terminal does not report its size, and tqdm would show nothing
                options |= {"dynamic_ncols": False, "ncols": size.columns or 80, "nrows": 24}
            self.bar = tqdm(total=total, initial=start, **options)
            _bars.append(self.bar)

    def add(self, count: int, note: str = "") -> None:
        """Adds `count` units. A note is shown until the next one.

        The first units are left out of rates, because they include the compilation.
        """
        self.count, self.note = self.count + count, note or self.note
        passed, is_first, self.is_first = time.monotonic() - self.said, self.is_first, False
        if self.bar is not None:
            if note:
                self.bar.set_postfix_str(note, refresh=False)
            if is_first:
                self.bar.n = self.bar.initial = self.bar.last_print_n = self.count
                self.bar.start_t = self.bar.last_print_t = time.time()
                self.bar.refresh()
            else:
                self.bar.update(count)
            return
        if passed >= self.every:
            since = time.monotonic() - self.begun
            rate = (self.count - self.begun_count) / since if since else 0.0
            of = f"/{self.total}" if self.total is not None else ""
            left = f", {(self.total - self.count) / rate:.0f} s left" if self.total is not None and rate else ""
            speed = "" if is_first else f", {rate:.2f}/s{left}"
            self.line(f"{self.what}: {self.count}{of} {self.unit}s{speed}{f'  {self.note}' if self.note else ''}")
        if is_first:
            self.begun, self.begun_count = time.monotonic(), self.count
        if passed >= self.every or is_first:
            self.said = time.monotonic()

    @contextlib.contextmanager
    def aside(self, what: str, of: str, first: str = "") -> Iterator[Callable[[str], None]]:
        """Returns a context manager for other work, during which the counted work pauses.

        Rates and the time left ignore the pause. A line, which is repeated during the work, shows the name of the work
        with the duration of the last such work, or with `first`. The context manager yields a function that sets the
        progress in these lines, such as "3 of 8 answers".
        """
        begun, took, reached = time.monotonic(), self._took.get(what), ""
        text = f"{what} {of}" + (first if took is None else f", {took:.0f} s the last time")

        def show(so_far: str = "") -> None:
            if self.bar is not None:
                self.bar.set_postfix_str(text + so_far)
            else:
                self.line(f"{self.what}: {text}{so_far}")

        def reach(count: str) -> None:
            nonlocal reached
            reached = f", {count}"
            if self.bar is not None:
                show(reached)

        def go_on() -> None:
            while not over.wait(max(self.every, 1.0)):
                show(f"{reached}, {time.monotonic() - begun:.0f} s so far")

        over = threading.Event()
        beside = threading.Thread(target=go_on, daemon=True)
        show()
        beside.start()
        try:
            yield reach
        finally:
            over.set()
            beside.join()
            passed = self._took[what] = time.monotonic() - begun
            self.said, self.begun = self.said + passed, self.begun + passed
            if self.bar is not None:
                self.bar.start_t += passed
                self.bar.last_print_t += passed
                self.bar.set_postfix_str(self.note)

    def line(self, text: str) -> None:
        """Writes a line, above the bar."""
        if self.shown:
            say(text)

    def close(self) -> None:
        """Removes the bar."""
        if self.bar in _bars:
            _bars.remove(self.bar)
            self.bar.close()
