"""Progress of long work: a bar on a terminal, plain lines without one. All on standard error."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

_bars: list[Any] = []  # on the terminal just now


def say(text: str) -> None:
    """A line on standard error that does not break a bar."""
    if _bars:
        _bars[-1].write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr, flush=True)


class Progress:
    """Counts units up to a total; without a terminal a line every `every` seconds."""

    def __init__(
        self, what: str, total: int | None, *, unit: str, start: int = 0, every: float = 15.0, shown: bool = True
    ) -> None:
        """With `shown` off it counts and says nothing."""
        self.shown, self.note = shown, ""
        self.what, self.total, self.unit, self.count, self.every = what, total, unit, start, every
        self.said, self.said_count = time.monotonic(), start
        self.bar: Any = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            options = {"desc": what, "unit": unit, "file": sys.stderr, "leave": False, "dynamic_ncols": True}
            self.bar = tqdm(total=total, initial=start, **options)
            _bars.append(self.bar)

    def add(self, count: int, note: str = "") -> None:
        """That many more are done; a note stays until the next one."""
        self.count, self.note = self.count + count, note or self.note
        if self.bar is not None:
            if note:
                self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(count)
        elif time.monotonic() - self.said >= self.every:
            before, self.said = self.said, time.monotonic()
            rate = (self.count - self.said_count) / (self.said - before)
            self.said_count = self.count
            of = f"/{self.total}" if self.total is not None else ""
            left = f", {(self.total - self.count) / rate:.0f} s left" if self.total is not None and rate else ""
            note = f"  {self.note}" if self.note else ""
            self.line(f"{self.what}: {self.count}{of} {self.unit}s, {rate:.2f}/s{left}{note}")

    @contextlib.contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Time that the work stands still, in rates and the time left as if it had not passed; says what for, if so."""
        begun = time.monotonic()
        if what and self.bar is not None:
            self.bar.set_postfix_str(what)
        elif what:
            self.line(f"{self.what}: {what}")
        try:
            yield
        finally:
            passed = time.monotonic() - begun
            self.said += passed
            if self.bar is not None:
                self.bar.start_t += passed
                self.bar.last_print_t += passed
                self.bar.set_postfix_str(self.note)

    def line(self, text: str) -> None:
        """A line that does not break the bar; nothing if this is not shown."""
        if self.shown:
            say(text)

    def close(self) -> None:
        """Removes the bar."""
        if self.bar in _bars:
            _bars.remove(self.bar)
            self.bar.close()
