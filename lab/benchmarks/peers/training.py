"""Times a training step of transformers' T5 in PyTorch, with as much work as a step of `lab.benchmarks.steps`.

    python -m lab.benchmarks.peers.training --config configs/jsonl.py --models base --ways plain --json OUT

The step uses autocast to bfloat16, the config's batch in the config's parts, clipped gradients, AdamW (fused on a GPU),
and the config's dropout. The decoder gets as many tokens as pipejax has slots. `WAYS` lists the ways in which users run
transformers.
"""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax

from lab.benchmarks.steps import add_flags, cases, failure, work
from lab.benchmarks.systems import names_of, save
from pipejax.config import Config, T5Config
from pipejax.system import cli
from pipejax.training import monitoring

WAYS = {
    "checkpointing": "transformers, gradient checkpointing",
    "plain": "transformers",
    "compiled": "transformers, torch.compile",
}


def main(argv: Sequence[str]) -> int:
    """Measures the cases, prints a line for each, and writes JSON after each."""
    parser = cli.Parser(prog="python -m lab.benchmarks.peers.training", description=__doc__)
    add_flags(parser)
    parser.add_argument("--ways", default=",".join(WAYS), metavar="NAME,...", help=f"of {', '.join(WAYS)} (all)")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    ways = names_of("--ways", flags.ways, WAYS)
    jax.config.update("jax_platforms", "cpu")  # leaves the memory of the GPU to PyTorch
    chosen = cases(flags)
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.cuda.get_device_name() if device == "cuda" else device
    found: dict[str, Any] = {"device": kind, "results": [], "failures": []}
    found["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    found["command"] = "python -m lab.benchmarks.peers.training " + " ".join(argv)
    for name, config in chosen:
        for way in ways:
            try:
                result = measured(config, way, device, flags.steps)
            except Exception as error:  # such as a lack of memory: the other cases are measured nevertheless
                found["failures"].append(failure(name, config, WAYS[way], error))
            else:
                peak = monitoring.peak(SimpleNamespace(device_kind=kind))
                utilisation = result["model_flops"] / result["step_s"] / peak if peak else None
                found["results"].append({"system": WAYS[way], "model": name, **result, "utilisation": utilisation})
                print("{system}, {model}, source {source}: {step_s:.3f} s a step".format(**found["results"][-1]))
            if device == "cuda":
                torch.cuda.empty_cache()  # memory of a finished case
            if flags.json:
                save(flags.json, found)
    return int(bool(found["failures"]))


def measured(config: Config, way: str, device: str, steps: int) -> dict[str, Any]:
    """The seconds of the last step and of the first step, and the peak memory."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = stepper(config, way, device)
    seconds = [step() for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    found = {"dtype": "bfloat16", "remat": "layers" if way == "checkpointing" else "none"}
    return (
        work(config)
        | found
        | {"step_s": seconds[-1], "compile_s": max(seconds[0] - seconds[-1], 0.0), "peak_bytes": peak}
    )


def stepper(config: Config, way: str, device: str) -> Callable[[], float]:
    """A function that makes a step and returns its seconds."""
    import torch
    from transformers import T5Config as Theirs
    from transformers import T5ForConditionalGeneration

    given, size = config.model, work(config)
    assert isinstance(given, T5Config)
    names = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers")
    shape = {name: getattr(given, name) for name in names}
    theirs = Theirs(**shape, dropout_rate=config.train.dropout, decoder_start_token_id=0, use_cache=False)
    with torch.device(device):
        model = T5ForConditionalGeneration(theirs).train()
        source = torch.randint(2, given.vocab_size, (size["batch"], size["source"]))
        labels = torch.randint(2, given.vocab_size, (size["batch"], size["slots"]))
    if way == "checkpointing":
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    called: Any = torch.compile(model) if way == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    parts = config.train.accumulate

    def step() -> float:
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for ids, answers in zip(source.chunk(parts), labels.chunk(parts), strict=True):
            with torch.autocast(device, torch.bfloat16):
                loss = called(input_ids=ids, labels=answers).loss
            (loss / parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    return step


if __name__ == "__main__":
    cli.run(main)
