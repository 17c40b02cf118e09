"""Tables in Markdown of the files in lab/benchmarks/results, for the pages in docs. `generated.py` shows them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks import plot, trees
from lab.experiments import distance_probes, relatives
from lab.experiments.tables import bounds, paper

DIRECTORY = Path(__file__).resolve().parent.parent / "lab" / "benchmarks" / "results"
SYSTEMS = {
    **plot.NAMES,
    "pipejax-pipelined-40x64": "pipelined, a grid of 40 rows",
    "pipejax-dense": "the whole grid",
    "pipejax-pipelined-xla": "pipelined, XLA's kernels",
    "pipejax-sequential-xla": "sequential, XLA's kernels",
}

INSTRUCTIONS = "python -m lab.benchmarks.instructions --targets h100,rtx4090 --json OUT"


def page(name: str) -> str:
    """The table of a file, with the machine and the command below it."""
    found = json.loads((DIRECTORY / name).read_text(encoding="utf-8"))
    if isinstance(found, list):
        return "\n".join([*instructions(found), "", "```text", INSTRUCTIONS, "```"])
    if "results" not in found:
        return "\n".join(calls(found))
    keys = found["results"][0].keys()
    build = KINDS.get(name) or next(build for key, build in KINDS.items() if key in keys)
    below = [f"- {name_of(f)} is left out{told(f)}: {f['error']}." for f in found.get("failures", [])]
    below = ["", *below] if below else []
    if machine := found.get("machine"):  # none has a part in what is counted or compiled
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        where = f"{machine['threads']} threads of an {machine['processor'].replace('(R)', '')}"
        if machine["device"].startswith("gpu"):
            where = machine["device"].removeprefix("gpu ")
        below += ["", f"{where}, Python {machine['python']}, {versions}."]
    below += ["", "```text", found["command"], "```"]
    return "\n".join([*build(found["results"]), *below])


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, words: int) -> list[str]:
    """The first `words` columns hold words, the others figures."""
    lines = [head, ["---"] * words + ["--:"] * (len(head) - words), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def name_of(result: dict[str, Any]) -> str:
    """A system in words."""
    return SYSTEMS.get(result["system"], result["system"])


def told(result: dict[str, Any]) -> str:
    """The answer of a result, and its batch if it is one of several documents, behind a comma; empty if it has none."""
    batch = f", batch {result['batch']}" if result.get("batch", 1) > 1 else ""
    return f", {result['pattern']}{batch}" if "pattern" in result else ""


def decoding(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.decode`, the fastest first; x is how many times as long as the system that was named first."""
    answers: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        answers.setdefault(told(r).removeprefix(", "), []).append(r)
    rows, alone = [], dict[str, None]()
    for answer, mine in answers.items():
        first = mine[0]
        for number, r in enumerate(sorted(mine, key=plot.seconds)):
            x = r["decode_s"] / first["decode_s"], plot.seconds(r) / plot.seconds(first)
            cells = ["" if number else answer, name_of(r), r["steps"]]
            times = (f"{r[key]:.{3 if r[key] >= 0.1 else 4}f}" for key in ("encode_s", "decode_s"))
            rows.append([*cells, *times, *(f"{each:.2f}" for each in x)])
            alone |= {name_of(r): None} if r.get("one_by_one") else {}
    head = ["answer", "system", "steps", "encoder, s", "decoder, s", "x, decoding", "x, both"]
    rounds = [r["rounds"] for r in results if "rounds" in r]
    some = f" ({min(rounds)} to {max(rounds)})" if rounds and min(rounds) < max(rounds) else ""
    below = [f"Medians over the rounds{some}; x is their quotient."]
    below += [f"{name} decodes one document after another: it is the time of one, as many times." for name in alone]
    return [*table(head, rows, words=2), "", *below]


def documents(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.documents`, the fastest first."""
    rows = [
        [name_of(r), r["documents"], f"{r['seconds']:.1f}", f"{r['documents'] / r['seconds']:.2f}"]
        for r in sorted(results, key=lambda r: r["seconds"])
    ]
    return table(["system", "documents", "seconds", "documents a second"], rows, words=1)


def training(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.train`."""
    rows = [[name_of(r), r["slots"], f"{r['step_s']:.2f}", f"{r['over_pipelined']:.2f}"] for r in results]
    return table(["system", "slots", "seconds a step", "x of pipelined"], rows, words=1)


def rounding(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.experiments.rounding`; equal is the share of documents with the rows of float32."""
    rows = [
        [r["weights"], f"{r['score']:.2f}", f"{r['equal']:.1f}", f"{r['log_prob']:.4f}", f"{r['milliseconds']:.2f}"]
        for r in results
    ]
    metric, strategy = results[0]["metric"], results[0]["strategy"]
    head = [f"weights, {strategy}", metric, "equal, %", "log-probability a token", "ms a document"]
    return table(head, rows, words=1)


def calls(found: dict[str, dict[str, float]]) -> list[str]:
    """Of `lab.experiments.drafts`: decoder calls an answer, by data set."""
    names = [f"{decoder}{how}" for decoder in ("sequential", "pipelined") for how in ("", ", simulated", ", product")]
    rows = [[data, each["examples"], *(f"{each[name]:.1f}" for name in names)] for data, each in found.items()]
    return table(["decoder calls an answer", "examples", *names], rows, words=1)


def memory(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.programs`: the encoder's program and a decoder's largest, and the paper's figures."""
    needs: dict[tuple[str, str], dict[str, list[dict[str, int]]]] = {}
    for r in results:
        of_model = needs.setdefault((r["model"], r["dtype"]), {})
        of_model.setdefault(r["program"].partition(",")[0], []).append(r["memory"])
    rows = []
    for (model, dtype), of_model in needs.items():
        (encoder,) = of_model.pop("encode")
        for decoder, plans in of_model.items():
            # A decoder's first program has its weights and the encoded source as arguments, later ones a cache as well.
            weights = encoder["argument"] + min(plan["argument"] for plan in plans) - encoder["output"]
            encoding = weights + encoder["output"] + encoder["temp"]
            decoding = max(encoder["argument"] + sum(plan.values()) - 2 * plan["alias"] for plan in plans)
            reported = [r.memory for (_, *which), r in paper.REPORTED.items() if which == [model, decoder]]
            known = [each for each in reported if each and dtype == "float32"]
            theirs = f"{min(known):,} to {max(known):,}" if known else ""
            sizes = (f"{size / 2**20:,.0f}" for size in (weights, encoding, decoding))
            rows.append([model, dtype, decoder, *sizes, theirs])
    return table(["T5", "dtype", "decoder", "weights, MiB", "encoding", "decoding", "paper, M"], rows, words=3)


def steps(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.programs`: operations and bytes of a step in each decoder's largest program."""
    largest: dict[tuple[str, ...], dict[str, Any]] = {}
    for r in results:
        if r["per_step"]:
            decoder, batch, _ = r["program"].split(", ")
            largest[r["target"], r["model"], decoder, batch.removeprefix("batch ")] = r
    rows = []
    for which, r in largest.items():
        (loop,) = r["loops"]
        bytes_read = f"{loop['bytes'] / 1e6:,.0f}", f"{r['least_bytes'] / 1e6:,.0f}"
        rows.append([*which, sum(loop["kernels"].values()), *bytes_read, f"{loop['bytes'] / r['least_bytes']:.2f}"])
    return table(["device", "T5", "decoder", "batch", "operations", "MB a step", "least", "x"], rows, words=3)


def instructions(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.instructions`: a thread's instructions for each score, in each kernel of block attention."""
    rows = []
    for r in results:
        loops = ("" if r[key] is None else f"{r[key]:.1f}" for key in ("plain", "general", "mean"))
        kernel = r["kernel"].strip("_").replace("_", " ")
        rows.append([r["target"], r["attention"], kernel, *loops, r["registers"], r["spilled_bytes"]])
    head = ["GPU", "attention", "kernel", "plain blocks", "other blocks", "mean", "registers", "spilled bytes"]
    return table(head, rows, words=3)


def training_steps(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.programs --train`: what a compiled training step does on each GPU, in each tree."""
    head = ["", *(f"{r['target']}, {'now' if r['tree'] == '.' else r['tree']}" for r in results)]
    kinds = {kind.replace("__gpu$xla.gpu.triton", "").strip(): kind for r in results for kind in r["kinds"]}
    names = {"product": "products", "elementwise": "elementwise", "reduction": "reductions", "copy": "copies"}
    names |= {"custom call": "attention in blocks"}
    rows = [
        ["kernels started", *(f"{r['starts']:,}" for r in results)],
        ["of which move less than 0.1 MB", *(f"{r['small_starts']:,}" for r in results)],
        ["GB read and written", *(f"{r['moved'] / 1e9:.0f}" for r in results)],
    ]
    for kind, name in names.items():
        sizes = [r["kinds"].get(kinds.get(kind, ""), {}).get("bytes", 0) for r in results]
        rows.append([f"of which {name}", *(f"{size / 1e9:.0f}" for size in sizes)])
    rows.append(["GiB of temporary memory", *(f"{r['memory']['temp'] / 2**30:.2f}" for r in results)])
    kernels = dict.fromkeys((own["attention"], own["kernel"]) for r in results for own in r["attention"])
    for attention, kernel in kernels:
        found = [
            [own for own in r["attention"] if (own["attention"], own["kernel"]) == (attention, kernel)] for r in results
        ]
        cells = [" and ".join(f"{n:.1f}" for n in one[0]["by_loop"]) if one else "" for one in found]
        rows.append([f"instructions a score, {attention}, {kernel.strip('_').replace('_', ' ')}", *cells])
    rows.append(["bytes of spilled registers", *(sum(own["spilled_bytes"] for own in r["attention"]) for r in results)])
    return table(head, rows, words=1)


def remat(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.cards`: the choice of `train.remat=auto`, and the estimates of all choices."""
    head = ["step", "card", "GiB for JAX", "chosen", *(f"GiB with {name}" for name in results[0]["gib"])]
    rows = []
    for r in results:
        sizes = (f"{size:.1f}" for size in r["gib"].values())
        chosen = r["remat"] if r["fits"] else f"{r['remat']}, which does not fit"
        rows.append([r["step"], r["card"], f"{r['jax_gib']:.1f}", chosen, *sizes])
    return table(head, rows, words=2)


def first_answers(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.first_use`, the fastest first: seconds of a process, and of its parts where it tells them."""
    rows = []
    for r in sorted(results, key=lambda r: r["whole_s"]):
        rows.append([name_of(r), *(f"{r[key]:.2f}" if key in r else "" for key in ("whole_s", "load_s", "answer_s"))])
    return table(["process", "whole, s", "loading", "answer"], rows, words=1)


def batches(results: list[dict[str, Any]]) -> list[str]:
    """Of `lab.benchmarks.trees`: answers a second of the code before, and now."""
    rows = []
    for r in results:
        lengths, now = trees.lengths_of(r["sources"]), r["new"]
        speeds = (len(lengths) / (r[tree]["encode_s"] + r[tree]["decode_s"]) for tree in ("new", "old"))
        unequal = "unequal" if len({*lengths}) > 1 else "equal"
        cells = [f"{now['encode_s']:.2f}", f"{now['decode_s']:.2f}", *(f"{each:.2f}" for each in speeds)]
        rows.append([unequal, len(lengths), max(lengths), sum(lengths), *cells, f"{r['both']:.2f}"])
    head = ["lengths", "documents", "longest", "tokens", "encoder, s", "decoder, s", "answers a second", "before", "x"]
    return table(head, rows, words=1)


# By its name, or a key of a result.
KINDS = {
    "both": batches,
    "whole_s": first_answers,
    "programs_tpu.json": steps,
    "training_step.json": training_steps,
    "remat.json": remat,
    "distance": distance_probes.table,
    "decode_s": decoding,
    "documents": documents,
    "step_s": training,
    "equal": rounding,
    "memory": memory,
    "free_ratio": bounds.table,
    "decoder_speed_ratio": relatives.table,
}
