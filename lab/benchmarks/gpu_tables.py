"""What `lab.benchmarks.gpu` found, for people: a few lines for the terminal, and the tables of docs/speed.md.

Standard library only.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

COMMAND = "make gpu-wheels         # where there is a network\nlab/benchmarks/gpu.sh   # on the machine with the GPU"
SYSTEMS = {
    "pipejax-pipelined": "pipelined",
    "pipejax-sequential": "sequential",
    "hf": "transformers",
    "hf-compiled": "transformers, compiled, static cache",
}
SETTINGS = {"loop": "with the loop", "kernels": "without it (XLA's default)", "none": "no command buffers"}
GIB = 2**30


def short(summary: dict[str, Any]) -> list[str]:
    """What ran, failed or was cut off, a line each."""
    wheels, lines = summary["wheels"], [where(summary)]
    if wheels["installed"]:
        lines.append(f"installed from wheels: {', '.join(wheels['installed'])}")
    lines += [f"not installed: {failure}" for failure in wheels["failures"]]
    for part in summary["parts"]:
        took = f"{part['seconds']:6.1f} s of {part['limit']:.0f}" if "seconds" in part else ""
        lines.append(f"{part['name']:<15}{part['status']:<12}{took}")
    return lines


def where(summary: dict[str, Any]) -> str:
    """The device, the versions and the day."""
    if summary["rehearsal"]:
        return "A rehearsal on a CPU with a tiny model: its figures mean nothing."
    device = summary["device"]
    memory = f" with {device['memory'] / GIB:.0f} GiB for JAX" if device.get("memory") else ""
    versions = ", ".join(f"{name} {version}" for name, version in device.get("versions", {}).items())
    return f"{device['kind']}{memory}; {versions}; {time.strftime('%Y-%m-%d', time.gmtime(summary['began']))}."


def page(summary: dict[str, Any] | None) -> list[str]:
    """The lines of the section, in Markdown; None: nobody has run it."""
    if summary is None:
        said = "Nobody has run this on a GPU yet. Whoever is lent one runs this first; it takes eight minutes:"
        return [said, "", "```text", COMMAND, "```"]
    lines = [where(summary)]
    for part in summary["parts"]:
        results = part.get("results")
        if part["status"] != "done":
            why = "" if results else last_line(part.get("said", ""))
            more = "; what it found is here" if results else f": `{why}`" if why else ""
            lines += ["", f"**{part['about']}: {part['status']}**{more}."]
        if results:
            lines += ["", *TABLES[part["name"]](results)]
    return lines


def last_line(text: str) -> str:
    """Of what a part said, fit for a line of Markdown."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].replace("`", "'")[:200] if lines else ""


def name_of(result: dict[str, Any]) -> str:
    """A system in words; of ours also whose kernels computed it, which need not be those that were asked for."""
    name = SYSTEMS.get(result["system"].removesuffix("-xla"), result["system"])
    if result["system"].endswith("-xla") or result.get("kernels") == "Xla":
        return f"{name}, XLA's kernels"
    return name


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int) -> list[str]:
    """In Markdown; the first `words` columns hold words, the others figures."""
    line = ["---"] * words + ["--:"] * (len(head) - words)
    return [f"| {' | '.join(cells)} |" for cells in (head, line, *rows)]


def kernels(found: dict[str, Any]) -> list[str]:
    """Of `lab.benchmarks.agreement`."""
    lines = [f"Own kernels {'agree' if found['agrees'] else '**do not agree**'} with XLA:", ""]
    rows = []
    for result in found["results"]:
        figures = [f"{key.replace('_', ' ')} {value:.3g}" for key, value in result.items() if isinstance(value, float)]
        said = result.get("error") or ", ".join(figures)
        agrees = {True: "yes", False: "**no**", None: "not compared"}[result["agrees"]]
        rows.append((result["name"], agrees, said.replace("|", "/")))
    return lines + table(("compared", "agrees", "found"), rows, words=3)


def decode(found: dict[str, Any]) -> list[str]:
    """Of `lab.benchmarks.decode`; x is how many times as long as the first system of the same answers."""
    rows, before, first = [], None, None
    for r in found["results"]:
        group = r["batch"], r["pattern"]
        first = r if group != before else first
        assert first is not None
        cells = (
            *((str(r["batch"]), r["pattern"]) if group != before else ("", "")),
            name_of(r),
            str(r["steps"]),
            f"{1e3 * r['decode_s'] / r['steps']:.3f}",
            f"{1e3 * r['encode_s']:.2f}",
            f"{1e3 * r['decode_s']:.2f}",
            f"{r['decode_s'] / first['decode_s']:.2f}",
            f"{(r['decode_s'] + r['encode_s']) / (first['decode_s'] + first['encode_s']):.2f}",
        )
        rows.append(cells)
        before = group
    head = ("batch", "answer", "system", "steps", "ms a step", "encoder, ms", "decoder, ms", "x, decoding", "x, both")
    title = f"T5-{found['model'].capitalize()}, {found['dtype']}, a source of {found['source']} tokens:"
    lines = [title, "", *table(head, rows, words=3)]
    for failure in found["failures"]:
        place = ", ".join(str(failure[key]) for key in ("batch", "pattern") if key in failure)
        lines += ["", f"Failed: {name_of(failure)} ({place or 'when it was loaded'}): `{last_line(failure['error'])}`."]
    return lines


def buffers(found: dict[str, Any]) -> list[str]:
    """Of `lab.benchmarks.buffers`."""
    rows = [
        (
            SETTINGS.get(r["setting"], r["setting"]),
            f"`{r['flags']}`" if r["flags"] else "",
            name_of(r),
            f"{1e3 * r['decode_s'] / r['steps']:.3f}",
            f"{1e3 * r['decode_s']:.2f}",
        )
        for r in found["results"]
    ]
    head = ("command buffers", "XLA_FLAGS", "system", "ms a step", "decoder, ms")
    refused = [f"`{t['flags']}`" for t in found["tried"] if not t["taken"]]
    more = ["", f"Refused, or failed: {', '.join(refused)}."] if refused else []
    return ["The decoding loop in CUDA's command buffers:", "", *table(head, rows, words=3), *more]


def train(found: dict[str, Any]) -> list[str]:
    """Of `lab.benchmarks.steps`, and of `lab.benchmarks.peers.training`, which knows less."""

    def gib(size: float | None) -> str:
        return "" if size is None else f"{size / GIB:.2f}"

    rows = [
        (
            r.get("system", "pipejax"),
            r["model"],
            f"{r['dtype']}, batch {r['batch']}, {r['source']} + {r['slots']} tokens, "
            f"remat {r['remat']}, accumulate {r['accumulate']}",
            f"{r['step_s']:.3f}",
            "" if r["utilisation"] is None else f"{r['utilisation']:.1%}",
            *(f"{r[key]:.1f}" if key in r else "" for key in ("compile_s", "cached_s")),
            *(gib(r.get(f"{which}_bytes")) for which in ("peak", "compiled", "estimate")),
        )
        for r in found["results"]
    ]
    times = ("seconds", "utilisation", "compiling, s", "from the cache, s")
    head = ("system", "model", "a step", *times, "peak, GiB", "compiler, GiB", "plan, GiB")
    lines = ["A training step, and its memory as measured, by the compiler and by `pipejax plan`:", ""]
    lines += table(head, rows, words=3)
    for failure in found["failures"]:
        of = ", ".join(str(failure[key]) for key in ("system", "model", "source") if key in failure)
        lines += ["", f"Failed: {of}: `{last_line(failure['error'])}`."]
    return lines


def profile(found: dict[str, Any]) -> list[str]:
    """Of `lab.benchmarks.profile`, with the three kernels that take most."""
    rows = []
    for r in found["results"]:
        waits = max(r["seconds"] - r["busy_s"], 0.0)
        most = ", ".join(f"{100 * each['seconds'] / r['seconds']:.0f}% {each['name'][:32]}" for each in r["most"][:3])
        figures = [f"{1e3 * seconds:.2f}" for seconds in (r["seconds"], r["busy_s"], waits)]
        rows.append((r["name"], most.replace("|", "/"), *figures, str(r["kernels"]), str(r["gaps"])))
    head = ("work", "most of it", "ms", "in kernels", "waiting", "kernels", "gaps of 10 us")
    lines = ["Kernels and waiting, by JAX's profiler:", "", *table(head, rows, words=2)]
    return lines + [f"\nFailed: {f['name']}: `{last_line(f['error'])}`." for f in found["failures"]]


def graph(found: dict[str, Any]) -> list[str]:
    """Of `lab.benchmarks.graph`."""
    rows = [(r["model"], str(r["queries"]), f"{1e3 * r['step_s']:.3f}") for r in found["results"]]
    lines = [f"A step by hand in PyTorch {found['torch']}, in a CUDA graph, a source of {found['source']} tokens:", ""]
    return lines + table(("model", "queries", "ms a step"), rows, words=1)


def tests(found: dict[str, Any]) -> list[str]:
    """Of `lab.benchmarks.suite`."""
    outcomes = [r["outcome"] for r in found["results"]]
    counts = ", ".join(f"{outcomes.count(x)} {x}" for x in ("passed", "failed", "skipped") if x in outcomes)
    lines = [f"Tests of the suite on this device: {counts or 'none'}."]
    return lines + [f"- `{r['name']}` failed" for r in found["results"] if r["outcome"] == "failed"]


TABLES = {
    "kernels": kernels,
    **dict.fromkeys(("decode", "compiled", "large"), decode),
    **dict.fromkeys(("train", "auto", "models", "lengths", "train-peers", "models-peers", "lengths-peers"), train),
    "buffers": buffers,
    "profile": profile,
    "graph": graph,
    "tests": tests,
}
