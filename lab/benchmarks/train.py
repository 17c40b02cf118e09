"""Times training steps of the pipelined target, the sequential target, a dense grid, and Hugging Face's T5.

    python -m lab.benchmarks.train --model base --pattern 8x14 --source 512 --batch 4 --peers hf --json OUT

All systems train the same T5 with AdamW on the same examples, whose answers are N rows of M tokens. "dense" computes
every slot of a grid of --sub-max x --time-max with pipejax's step, which is a literal reading of the paper. The systems
take turns, in another order in each round. Times are medians, and a ratio is the median of the ratios in the rounds.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lab.benchmarks.decode import rows_of
from lab.benchmarks.systems import SIZES, machine, random_params, save, use_threads
from pipejax import grid
from pipejax.config import Config, GridConfig, MeshConfig, T5Config, TrainConfig
from pipejax.data.batches import collate, pack_size
from pipejax.data.encoding import Encoded
from pipejax.model import sharding
from pipejax.system import cli, compile_cache
from pipejax.system.progress import Progress
from pipejax.training.step import Trainer

Step = Callable[[], float]  # makes one step and returns its seconds


def main(argv: Sequence[str]) -> int:
    """Measures the systems, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.train", description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="base")
    parser.add_argument("--pattern", default="8x14", metavar="NxM")
    parser.add_argument("--source", type=int, default=512, metavar="L", help="tokens of each source (512)")
    parser.add_argument("--batch", type=int, default=4, metavar="B", help="examples of a step (4)")
    parser.add_argument("--peers", default="", metavar="NAME,...", help="hf, or nothing")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of each system (2)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="dropout of each system (0)")
    parser.add_argument("--remat", choices=("none", "dots", "layers"), default="none")
    parser.add_argument("--sub-max", type=int, default=20, metavar="S", help="rows of the dense grid (20)")
    parser.add_argument("--time-max", type=int, default=50, metavar="T", help="time-steps of the dense grid (50)")
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    use_threads(flags.threads)
    compile_cache.use_cache()
    rows, model = rows_of(flags.pattern), SIZES[flags.model]
    rng = np.random.default_rng(1)
    source = rng.integers(3, model.vocab_size, (flags.batch, flags.source)).astype(np.int32)
    answers = [[rng.integers(3, model.vocab_size, n).tolist() for n in rows] for _ in range(flags.batch)]
    config = Config(
        model=model,
        grid=GridConfig(delay=1, time_max=flags.time_max, sub_max=flags.sub_max),
        train=TrainConfig(
            batch_size=flags.batch, dropout=flags.dropout, dtype=flags.dtype, remat=flags.remat, weight_decay=0.01
        ),
        mesh=MeshConfig(data=1),
    )
    pipelined = [grid.flatten(answer, delay=1, bos=0, eos=1) for answer in answers]
    # The sequential target has all rows in one, with a separator of one token between two rows.
    joined = [[[t for row in answer for t in (*row, 2)][:-1]] for answer in answers]
    sequential = [grid.flatten(answer, delay=1, bos=0, eos=1, final=False) for answer in joined]
    dense = [_dense(target, flags.sub_max, flags.time_max) for target in pipelined]
    params = random_params(model)
    ours = {"pipelined": pipelined, "sequential": sequential, "dense": dense}
    slots, makers = {}, dict[str, Callable[[], Step]]()
    for name, targets in ours.items():
        examples = [Encoded(str(i), s, t, False, False) for i, (s, t) in enumerate(zip(source, targets, strict=True))]
        batch = collate(examples, 1 if name == "dense" else pack_size(config.train))
        slots[f"pipejax-{name}"] = int(batch.arrays["inputs"].size)
        makers[f"pipejax-{name}"] = _ours(config, params, batch.arrays)
    if "hf" in flags.peers.split(","):
        slots["hf"] = sum(len(t.inputs) for t in sequential)
        makers["hf"] = _torch(model, params, source, joined, flags.threads, flags.dropout)
    names = list(makers)
    progress = Progress("measuring", len(names) * (flags.rounds + 1), unit="step")
    systems = {name: make() for name, make in makers.items()}
    del params
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(flags.rounds + 1):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            took = systems[name]()
            if turn:  # the first turn is a warm-up
                seconds[name].append(took)
            progress.add(1)
    progress.close()
    first = seconds["pipejax-pipelined"]
    lengths = np.asarray([(flags.source, len(target.inputs)) for target in pipelined])
    results = [
        {
            "system": name,
            "pattern": flags.pattern,
            "slots": slots[name],
            "step_s": float(np.median(seconds[name])),
            "over_pipelined": float(np.median([own / other for own, other in zip(seconds[name], first, strict=True)])),
        }
        for name in names
    ]
    setting = f"{flags.dtype}, dropout {flags.dropout:g}"
    print(f"{flags.model}, {flags.pattern}, batch {flags.batch}, source {flags.source}, {setting}")
    print(f"{'system':<22}{'slots':>8}{'s a step':>12}{'x pipelined':>14}")
    for result in results:
        print("{system:<22}{slots:>8}{step_s:>12.3f}{over_pipelined:>14.2f}".format(**result))
    print(f"{model.training_flops(lengths) / np.median(first) / 1e9:.1f} GFLOP/s of the model's own")
    if flags.json:
        command = "python -m lab.benchmarks.train " + " ".join(argv)
        save(flags.json, {"results": results, "machine": machine(flags.threads), "command": command})
    return 0


def _dense(target: grid.Flat, sub_max: int, time_max: int) -> grid.Flat:
    """The same target, with a slot for each place on the grid."""
    place = target.time * sub_max + target.row
    if place.max() >= sub_max * time_max or target.row.max() >= sub_max:
        raise ValueError(f"expected a pattern that a grid of {sub_max} x {time_max} holds")
    slots = np.arange(sub_max * time_max)
    full = {name: np.zeros(len(slots), getattr(target, name).dtype) for name in ("inputs", "targets", "weights")}
    for name, values in full.items():
        values[place] = getattr(target, name)
    return grid.Flat(**full, row=(slots % sub_max).astype(np.int32), time=(slots // sub_max).astype(np.int32))


def _ours(config: Config, params: Any, arrays: dict[str, np.ndarray]) -> Callable[[], Step]:
    def make() -> Step:
        trainer = Trainer(config)
        state, batch = trainer.fresh(params), sharding.put_batch(arrays, trainer.mesh)
        program = trainer.program({name: x.shape for name, x in batch.items()})
        held = [state]

        def step() -> float:
            begun = time.perf_counter()
            held[0], values = program(held[0], batch, trainer.dropout_key(1))
            jax.block_until_ready((held[0], values))
            return time.perf_counter() - begun

        return step

    return make


def _torch(
    model: T5Config, params: Any, source: np.ndarray, joined: list[list[list[int]]], threads: int, dropout: float
) -> Callable[[], Step]:
    def make() -> Step:
        import tempfile
        from pathlib import Path

        import torch
        from transformers import T5ForConditionalGeneration

        from lab.benchmarks.systems import write

        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as scratch:
            peer = T5ForConditionalGeneration.from_pretrained(write(model, params, Path(scratch)))
        peer.train()
        peer.config.dropout_rate = dropout
        for module in peer.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
            elif hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = dropout  # dropout of the weights of attention
        optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, weight_decay=0.01)
        labels = torch.tensor([[*answer[0], 1] for answer in joined])
        ids = torch.tensor(source, dtype=torch.long)

        def step() -> float:
            begun = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            peer(input_ids=ids, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            optimizer.step()
            return time.perf_counter() - begun

        return step

    return make


if __name__ == "__main__":
    cli.run(main)
