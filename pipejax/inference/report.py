"""Totals of a decode: examples, time, steps, and the numbers of truncated sources and answers."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from pipejax.methods import Method
from pipejax.system.strict_json import JsonObject


@dataclasses.dataclass
class Report:
    """Totals of a decode."""

    examples: int = 0
    seconds: float = 0.0  # the time of generation and detokenisation, without compilation and tokenisation
    times_encoder: bool = False  # whether batches wait for the encoder, to measure its seconds
    encoder_seconds: float = 0.0  # a part of `seconds`; 0 without `times_encoder`
    compile_seconds: float = 0.0
    compiles_within: bool = False  # whether `seconds` includes an unknown time of compilation
    shapes: int = 0  # compiled programs
    steps: int = 0
    calls: int = 0  # decoder calls
    # The steps that the other method would take for the same rows, without limits; None: the rows are unknown.
    other_steps: int | None = 0
    cut_sources: int = 0
    repeated: int = 0  # rows left out because they repeat an earlier one
    truncated: Counter[str] = dataclasses.field(default_factory=Counter)

    @classmethod
    def of_all(cls, parts: "Sequence[Report]") -> "Report":
        """Returns the totals over processes that each decoded a part at the same time."""
        others = [part.other_steps for part in parts]
        found = cls(other_steps=None if None in others else sum(n for n in others if n))
        for key in ("examples", "steps", "calls", "cut_sources", "repeated"):
            setattr(found, key, sum(getattr(part, key) for part in parts))
        for key in ("seconds", "encoder_seconds", "compile_seconds", "shapes"):
            setattr(found, key, max(getattr(part, key) for part in parts))
        found.truncated = sum((Counter(part.truncated) for part in parts), Counter())
        return found

    def summary(self, method: Method) -> JsonObject:
        """Returns means and counts. Steps of `method` are measured; steps of the other method are ideal."""
        count = max(self.examples, 1)
        own, other = self.steps / count, self.other_steps / count if self.other_steps else None
        both = (method.name, own), (method.baseline, other)
        (slow, most), (fast, least) = both if method.parts_text else both[::-1]
        return {
            "steps": own,
            "calls": self.calls / count,
            f"{slow}_steps": most,
            f"{fast}_steps": least,
            "step_ratio": most / least if most and least else None,
            "examples_per_second": self.examples / self.seconds if self.seconds else None,
            "compile_seconds": self.compile_seconds,
            "compiled_shapes": self.shapes,
            "truncated": dict(sorted(self.truncated.items())),
            "cut_sources": self.cut_sources,
        }

    def lines(self, method: Method) -> list[str]:
        """Returns the summary as lines of text."""
        s = self.summary(method)
        slow, fast = (key.removesuffix("_steps") for key in s if key.endswith("_steps"))
        ratio = s["step_ratio"] and (
            f"; ideal step ratio {slow}/{fast} {s['step_ratio']:.2f} "
            f"({s[f'{slow}_steps']:.1f} / {s[f'{fast}_steps']:.1f})"
        )
        compiled = f"left out: {self.compile_seconds:.1f} s for {self.shapes} shapes"
        if self.compiles_within:
            compiled = "included"
        calls = f", {s['calls']:.1f} decoder calls" if self.calls != self.steps else ""
        cuts = ", ".join(f"{n} by {name}" for name, n in s["truncated"].items()) or "none"
        repeated = f"; rows left out, as they repeat one above: {self.repeated}" if self.repeated else ""
        return [
            f"{self.examples} examples, {s['examples_per_second'] or 0:.2f} examples/s (compilation {compiled})",
            f"{s['steps']:.1f} steps on average{ratio or ''}{calls}",
            f"truncated: {cuts}; sources cut at data.max_source: {self.cut_sources}{repeated}",
        ]
