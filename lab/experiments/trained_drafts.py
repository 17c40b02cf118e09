"""Times drafts with trained weights, and Hugging Face's prompt lookup and assistant with the same weights.

    python -m lab.experiments.trained_drafts --checkpoint runs/mine --input texts.jsonl --peers hf,hf+lookup
    python -m lab.experiments.trained_drafts --checkpoint runs/mine --input texts.jsonl --small runs/small \
        --drafts none,source,model --peers hf,hf+lookup,hf+assistant

The systems take turns to answer the same sources, several sources in a turn, one at a time, in several rounds; the
first round, which compiles, does not count. Times are for whole answers, the encoder included. Pipejax pads sources as
`pipejax decode` does; Hugging Face pads none. If a draft changes an answer of pipejax, the command fails. Answers of
Hugging Face are compared too, but only the share of equal answers is reported, since Hugging Face rounds sums
differently. Hugging Face's systems need weights of the sequential method.
"""

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lab.benchmarks.systems import machine, names_of, save, settle, use_threads
from pipejax import checkpoint
from pipejax.convert.huggingface import write_hf
from pipejax.data.formats import read_records
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

DRAFTS, PEERS = ("none", "source", "jacobi", "model", "spans"), ("hf", "hf+lookup", "hf+assistant")


class Answer(NamedTuple):
    """The answer of a system to one source."""

    rows: list[list[int]]  # token ids
    calls: int
    seconds: float


class System(Protocol):
    """A system that the command measures."""

    name: str
    beside: str  # the name of the system for comparison: the same kind without drafts
    is_ours: bool
    accepted: float | None  # the share of drafted tokens that was correct; None: unknown, or nothing was drafted

    def answer(self, ids: list[int]) -> Answer:
        """Answers a source; `ids` includes the eos."""


class Ours:
    """pipejax with a checkpoint and one drafter."""

    is_ours = True
    accepted: float | None = None

    def __init__(self, generator: Generator, traced: Generator | None) -> None:
        """Prepares the system. `traced`: the same generator with traces of drafts; None: there are no drafts."""
        held, draft = generator.config.decode.weights, generator.config.decode.draft
        self.name, self.beside = (f"{generator.default_method}, {held}, {x}" for x in (draft, "none"))
        self.generator, self.traced = generator, traced

    def judge(self, sources: Sequence[list[int]]) -> None:
        """Sets `accepted` from these sources."""
        if self.traced is None:
            return
        records = [record for ids in sources for record in self.traced.decode([ids])]  # one at a time, as in turns
        asked = [one for record in records for call in record["trace"] for one in call]
        self.accepted = sum(one.accepted for one in asked) / max(sum(len(one.drafted) for one in asked), 1)

    def answer(self, ids: list[int]) -> Answer:
        """See `System`."""
        begun = time.perf_counter()
        (record,) = self.generator.decode([ids])
        return Answer(record["row_ids"], record["calls"], time.perf_counter() - begun)


class HuggingFace:
    """`generate` of transformers in float32: greedy, with `prompt_lookup_num_tokens`, or with an assistant."""

    is_ours = False
    accepted: float | None = None

    def __init__(self, name: str, beside: str, model: Any, assistant: Any, tokens: int, longest: int) -> None:
        """Prepares the system.

        Args:
          name: "hf", "hf+lookup" or "hf+assistant".
          beside: the name of the system for comparison.
          model: a model of transformers.
          assistant: the model of transformers that drafts.
          tokens: the number of drafted tokens.
          longest: most tokens of an answer, eos included.
        """
        import torch

        self.name, self.beside, self.torch, self.model, self.calls = name, beside, torch, model, 0
        self.options = {"max_new_tokens": longest, "do_sample": False, "num_beams": 1}
        self.options |= {"prompt_lookup_num_tokens": tokens} if name == "hf+lookup" else {}
        self.options |= {"assistant_model": assistant} if name == "hf+assistant" else {}
        model.decoder.register_forward_hook(lambda *_: setattr(self, "calls", self.calls + 1))

    def answer(self, ids: list[int]) -> Answer:
        """See `System`."""
        begun, self.calls = time.perf_counter(), 0
        with self.torch.inference_mode():
            given = self.torch.tensor([ids])
            found = self.model.generate(input_ids=given, attention_mask=self.torch.ones_like(given), **self.options)
        tokens = found[0, 1:].tolist()
        end = self.model.config.eos_token_id
        return Answer(
            [tokens[: tokens.index(end)] if end in tokens else tokens], self.calls, time.perf_counter() - begun
        )


def main(argv: Sequence[str]) -> int:
    """Measures the systems, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.experiments.trained_drafts", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--input", required=True, metavar="FILE", help='lines with a "source"')
    parser.add_argument(
        "--documents", type=cli.whole_number(1), default=100, metavar="N", help="answer the first N sources (100)"
    )
    parser.add_argument("--rounds", type=cli.whole_number(1), default=3, metavar="N")
    parser.add_argument(
        "--turn", type=cli.whole_number(1), default=10, metavar="N", help="sources in a system's turn (10)"
    )
    parser.add_argument("--drafts", default=",".join(DRAFTS[:2]), metavar="NAME,...", help=f"of {', '.join(DRAFTS)}")
    parser.add_argument("--weights", default="float32", metavar="NAME,...", help="some of float32, int8")
    parser.add_argument("--peers", default="", metavar="NAME,...", help=f"some of {', '.join(PEERS)}; make venv-bench")
    parser.add_argument(
        "--small", default="", metavar="DIR", help="checkpoint of the T5 that drafts for model and hf+assistant"
    )
    parser.add_argument(
        "--tagger", default="", metavar="DIR", help="a run of pipejax teach --tagger for spans (default: --checkpoint)"
    )
    parser.add_argument(
        "--tokens", type=cli.whole_number(1, 64), default=8, metavar="D", help="tokens drafted in a call (8)"
    )
    parser.add_argument(
        "--threads", type=cli.whole_number(1), default=2, metavar="N", help="threads of each system (2)"
    )
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    drafts, peers = names_of("--drafts", flags.drafts, DRAFTS), names_of("--peers", flags.peers, PEERS)
    weights = names_of("--weights", flags.weights, ("float32", "int8"))
    if "none" not in drafts:
        raise UserError("--drafts", found="a list without none", expected="none, with which the others are compared")
    drafts.sort(key=lambda name: name != "none")
    if ("model" in drafts or "hf+assistant" in peers) and not flags.small:
        raise UserError("--small", found="none", expected="the checkpoint of the T5 that drafts")
    use_threads(flags.threads)
    systems: list[System] = []
    for held, draft in itertools.product(weights, drafts):
        settings = [f"decode.weights={held}", f"decode.draft={draft}", f"decode.draft_tokens={flags.tokens}"]
        checkpoints = {"model": flags.small, "spans": flags.tagger}
        settings += [f"decode.draft_checkpoint={checkpoints[draft]}"] if checkpoints.get(draft) else []
        generator = load(flags.checkpoint, best=flags.best, overrides=settings)
        traced = None
        if draft != "none":
            traced = load(flags.checkpoint, best=flags.best, overrides=[*settings, "decode.trace=true"])
        systems.append(Ours(generator, traced))
    if peers:
        if generator.default_method != "sequential":
            raise UserError("--peers", found=f"{generator.default_method} weights", expected="sequential ones")
        systems += of_transformers(flags, peers, systems[0].name, generator.config.decode.max_length)
    sources = [
        list(generator.ids_of(generator.source(value, place, place)))
        for place, value in itertools.islice(read_records(flags.input), flags.documents)
    ]
    found: dict[str, list[list[Answer]]] = {system.name: [] for system in systems}
    progress = Progress("answering", len(sources) * (flags.rounds + 1), unit="source")
    for number in range(flags.rounds + 1):
        answers: dict[str, list[Answer]] = {system.name: [] for system in systems}
        for i, turn in enumerate(sources[k : k + flags.turn] for k in range(0, len(sources), flags.turn)):
            for system in systems[i % len(systems) :] + systems[: i % len(systems)]:
                settle()
                answers[system.name] += [system.answer(ids) for ids in turn]
            progress.add(len(turn))
        for name, mine in answers.items():
            found[name] += [mine] if number else []
    progress.close()
    for system in systems:
        if isinstance(system, Ours):
            system.judge(sources)
    results = [summary(system, found) for system in systems]
    print(table(results, len(sources)))
    if flags.json:
        command = "python -m lab.experiments.trained_drafts " + " ".join(argv)
        save(flags.json, {"results": results, "machine": machine(flags.threads), "command": command})
    return 0


def of_transformers(flags: Any, peers: Sequence[str], beside: str, longest: int) -> list[System]:
    """The systems of transformers with the same weights; `beside`: the name of our system for comparison."""
    import torch
    from transformers import T5ForConditionalGeneration

    torch.set_num_threads(flags.threads)

    def opened(directory: str, best: bool) -> Any:
        restored = checkpoint.open_run(directory, best=best)
        assert restored.config.model is not None, "checked by open_run"
        with tempfile.TemporaryDirectory(prefix="pipejax-drafts-") as scratch:
            write_hf(restored.config.model, restored.items["params"], Path(scratch) / "hf", None)
            return T5ForConditionalGeneration.from_pretrained(Path(scratch) / "hf", dtype=torch.float32).eval()

    model, small = opened(flags.checkpoint, flags.best), None
    if "hf+assistant" in peers:
        small = opened(flags.small, False)
        small.generation_config.num_assistant_tokens = flags.tokens
    return [HuggingFace(name, beside, model, small, flags.tokens, longest) for name in peers]


def summary(system: System, found: dict[str, list[list[Answer]]]) -> dict[str, Any]:
    """The record of a system: means, and its speed-up over the system for comparison.

    Raises:
      AssertionError: drafts changed an answer.
    """
    mine, others = found[system.name], found[system.beside]
    equal = [a.rows == b.rows for a, b in zip(mine[0], others[0], strict=True)]
    assert all(equal) or not system.is_ours, f"{system.name}: drafts changed the rows of an answer"
    tokens = sum(len(row) + 1 for answer in mine[0] for row in answer.rows)
    totals = [sum(a.seconds for a in answers) for answers in mine]
    pairs = zip(totals, (sum(a.seconds for a in answers) for answers in others), strict=True)
    return {
        "system": system.name,
        "beside": system.beside,
        "tokens": tokens / len(equal),  # tokens of an answer, with an eos for each row
        "calls": sum(a.calls for a in mine[0]) / len(equal),
        "accepted": system.accepted,
        "seconds": statistics.median(totals) / len(equal),
        "faster": statistics.median(other / own for own, other in pairs),
        "equal": sum(equal) / len(equal),
    }


def table(results: Sequence[dict[str, Any]], count: int) -> str:
    """The table as text."""
    lines = [
        f"{count} sources, one at a time; times include the encoder. Speed-ups of pipejax are over the same weights",
        f"without drafts, and speed-ups of Hugging Face are over {results[0]['system']}.",
        f"{'system':<32}{'tokens':>8}{'calls':>8}{'accepted':>10}{'ms':>9}{'faster':>9}{'equal':>8}",
    ]
    for r in results:
        accepted = "" if r["accepted"] is None else f"{r['accepted']:.1%}"
        lines.append(
            f"{r['system']:<32}{r['tokens']:>8.1f}{r['calls']:>8.1f}{accepted:>10}{1e3 * r['seconds']:>9.1f}"
            f"{r['faster']:>8.2f}x{r['equal']:>8.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
