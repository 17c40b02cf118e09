"""Measures how often prompt columns guess the tokens of a model's answers, with the weights of the model frozen.

    python -m lab.experiments.prompt_columns --checkpoint RUN [--steps N] [--limit N] [--json OUT]

A prompt column is fed after the newest token of a row and guesses the token after the next one; the next column guesses
the token after that. A column sees what the newest token sees, and the columns before it (Chen et al. 2024, arXiv
2405.18628). It is fed one of three embeddings:

- mean: the mean embedding of the source, which is not trained;
- trained: a vector for each column;
- hidden: a linear map of the decoder's output at the newest token and a vector, for each column.

The model answers the examples of its task greedily, and the columns are trained on the answers to the split "train" and
measured on those to "dev". Answers that are truncated, or whose text has other tokens, are left out.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from lab.benchmarks.systems import machine, save, use_threads
from pipejax import checkpoint, grid
from pipejax.config import Config
from pipejax.data import make_task
from pipejax.data.batches import collate
from pipejax.data.encoding import Encoded, encode_example
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference.answers import Record, texts
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.model.backbone import Module
from pipejax.offline.evaluation import decode_examples
from pipejax.system import Tree, cli
from pipejax.system.progress import Progress

Array = jax.Array
FORMS = ("mean", "trained", "hidden")
COLUMNS = 3  # columns of a row
BATCH = 16


def main(argv: Sequence[str]) -> int:
    """Decodes, trains the columns, and prints the results."""
    parser = cli.Parser(prog="python -m lab.experiments.prompt_columns", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--steps", type=cli.whole_number(1), default=1000, metavar="N", help="updates (default: 1000)")
    parser.add_argument("--rate", type=float, default=0.01, metavar="X", help="AdamW's rate (default: 0.01)")
    parser.add_argument("--limit", type=cli.whole_number(1), default=2000, metavar="N", help="training examples (2000)")
    parser.add_argument("--threads", type=cli.whole_number(1), default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--json", metavar="OUT", help="file for all figures")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    use_threads(flags.threads)
    generator = load(flags.checkpoint)
    task = make_task(generator.config.data, generator.config.grid.row_names)
    train = answered(generator, task.examples("train")[: flags.limit])
    dev = answered(generator, task.examples("dev")[:512])
    restored = checkpoint.open_run(flags.checkpoint)
    assert restored.config.model is not None
    model, params = restored.config.model.module(), restored.items["params"]
    results = []
    for form in FORMS:
        columns = train_columns(model, params, form, train, steps=flags.steps, rate=flags.rate)
        results.append({"form": form, **measure(model, params, form, columns, dev)})
        print(line(results[-1]), flush=True)
    if flags.json:
        command = " ".join(["python -m lab.experiments.prompt_columns", *argv])
        facts = {"train": len(train), "dev": len(dev), "steps": flags.steps, "command": command}
        save(flags.json, {"results": results, "machine": machine(flags.threads), **facts})
    return 0


def line(result: dict[str, Any]) -> str:
    """A result as a line of text."""
    shares = ", ".join(f"{share:.1f} %" for share in result["right"])
    return f"{result['form']}: of {result['tokens']} tokens, columns 1 to {COLUMNS} guess {shares}"


def answered(generator: Generator, examples: Sequence[Example]) -> list[Encoded]:
    """Decodes the examples; returns the model's complete answers, laid out as for training."""
    config, tokenizer = generator.config, generator.tokenizer
    assert tokenizer is not None and config.model is not None
    progress = Progress("answering", len(examples), unit="example")
    records, _ = decode_examples(
        generator, examples, method=generator.default_method, metric="exact", batch_size=BATCH, tick=progress.add
    )
    progress.close()
    pairs = zip(examples, records, strict=True)
    found = [as_target(example, record, config, tokenizer) for example, record in pairs if not record["truncated"]]
    kept = [encoded for encoded in found if encoded is not None]
    print(f"{len(kept)} of {len(examples)} answers are used", flush=True)
    return kept


def as_target(example: Example, record: Record, config: Config, tokenizer: Tokenizer) -> Encoded | None:
    """The record's answer laid out as for training; None: its text has other tokens."""
    assert config.model is not None
    rows = [row for row in texts(record) if row.strip()]
    encoded = encode_example(dataclasses.replace(example, targets=tuple(rows)), tokenizer, config, config.model)
    target = encoded.target
    learned = target.weights > 0  # the other slots feed the end tokens of rows
    written = [target.targets[learned & (target.row == row)].tolist() for row in range(int(target.row.max()) + 1)]
    expected = [[*row, config.model.eos_token_id] for row in record["row_ids"]]
    return encoded if written[: len(expected)] == expected else None


def init_columns(model: Module, form: str) -> Tree:
    """The parameters of the columns of a form."""
    width = model.config.d_model
    vectors = jnp.zeros((COLUMNS, width))
    return {
        "trained": {"vectors": vectors},
        "hidden": {"vectors": vectors, "maps": jnp.zeros((COLUMNS, width, width))},
    }.get(form, {})


def embeddings(columns: Tree, mean: Array, hidden: Array) -> Array:
    """The embeddings f32 [K, B, N, D] of the columns after each slot.

    Args:
      columns: the parameters of the columns.
      mean: f32 [B, D], the mean embedding of each source.
      hidden: f32 [B, N, D], the decoder's output at each slot.
    """
    found = jnp.broadcast_to(mean[None, :, None], (COLUMNS, *hidden.shape))
    if "vectors" in columns:
        found = found + columns["vectors"][:, None, None]
    return found + jnp.einsum("bnd,kde->kbne", hidden, columns["maps"]) if "maps" in columns else found


def guess(model: Module, params: Tree, columns: Tree, batch: dict[str, Array]) -> Array:
    """The logits f32 [K, B, N, V] of the columns after each slot of a batch of `collate`, with one target a row."""
    row, time, inputs = batch["row"], batch["time"], batch["inputs"]
    size, slots = inputs.shape
    real = jnp.arange(slots) < batch["slots"][:, None]
    seen = grid.visible(row[:, :, None], time[:, :, None], row[:, None], time[:, None]) & real[:, None]
    source_mask = jnp.arange(batch["source"].shape[1]) < batch["source_length"][:, None]
    given = {"params": params}, batch["source"], source_mask
    hidden = model.apply(*given, inputs, seen, grid.position(row, time), method="hidden")
    embedded = params["shared"]["embedding"][batch["source"]]
    mean = (embedded * source_mask[:, :, None]).sum(1) / source_mask.sum(1)[:, None]
    more = embeddings(columns, mean, hidden).swapaxes(0, 1).reshape(size, COLUMNS * slots, -1)
    own = jnp.broadcast_to(jnp.eye(slots, dtype=bool), seen.shape)
    none = jnp.zeros_like(seen)
    masks = [
        jnp.concatenate([seen, *(own if j <= k else none for j in range(COLUMNS))], axis=2) for k in range(COLUMNS)
    ]
    whole = jnp.concatenate([jnp.concatenate([seen, *[none] * COLUMNS], axis=2), *masks], axis=1)
    position = jnp.concatenate([grid.position(row, time + k) for k in range(COLUMNS + 1)], axis=1)

    def feed(call: Callable[..., Array], values: tuple[Any, ...], options: dict[str, Any], context: Any) -> Array:
        """Replaces the embeddings of the columns in the decoder's input."""
        if context.module.path == ("decoder",) and context.method_name == "__call__":
            values = jnp.concatenate([values[0][:, :slots], more.astype(values[0].dtype)], axis=1), *values[1:]
        return call(*values, **options)

    with nn.intercept_methods(feed):
        outputs = model.apply(*given, jnp.tile(inputs, (1, COLUMNS + 1)), whole, position, method="hidden")
    outputs = outputs[:, slots:].reshape(size, COLUMNS, slots, -1).swapaxes(0, 1)
    logits: Array = model.apply({"params": params}, outputs, method="logits")
    return logits


def wanted(batch: dict[str, Array]) -> tuple[Array, Array]:
    """The tokens i32 [K, B, N] that the columns after each slot should guess, and whether there are such tokens."""
    slots = batch["row"].shape[1]
    index, found, exists = jnp.arange(slots), [], []
    for k in range(1, COLUMNS + 1):
        place = jnp.minimum(index + k, slots - 1)
        found.append(batch["targets"][:, place])
        in_row = (batch["row"][:, place] == batch["row"]) & (index + k < batch["slots"][:, None])
        exists.append(in_row & (batch["weights"][:, place] > 0))
    return jnp.stack(found), jnp.stack(exists)


def train_columns(
    model: Module, params: Tree, form: str, examples: Sequence[Encoded], *, steps: int, rate: float
) -> Tree:
    """Trains the columns of a form; returns their parameters."""
    columns = init_columns(model, form)
    if not columns:
        return columns
    optimizer = optax.adamw(optax.linear_schedule(rate, 0.0, steps), weight_decay=0.0)
    if "maps" in columns:  # the outputs of the decoder are large
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    state = optimizer.init(columns)

    def loss(columns: Tree, batch: dict[str, Array]) -> Array:
        tokens, exists = wanted(batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(guess(model, params, columns, batch), tokens)
        return jnp.where(exists, losses, 0).sum() / jnp.maximum(exists.sum(), 1)

    @jax.jit
    def update(columns: Tree, state: Any, batch: dict[str, Array]) -> tuple[Tree, Any, Array]:
        value, gradient = jax.value_and_grad(loss)(columns, batch)
        changes, state = optimizer.update(gradient, state, columns)
        return optax.apply_updates(columns, changes), state, value

    rng, fit = np.random.default_rng(0), shape_of(examples)
    progress = Progress(f"training the columns of form {form}", steps, unit="update")
    for _ in range(steps):
        chosen = [examples[i] for i in rng.integers(len(examples), size=BATCH)]
        columns, state, _ = update(columns, state, collate(chosen, fit=fit).arrays)
        progress.add(1)
    progress.close()
    return columns


def measure(model: Module, params: Tree, form: str, columns: Tree, examples: Sequence[Encoded]) -> dict[str, Any]:
    """The percentages of tokens that the columns guess; a column counts only if all columns before it are correct."""
    compute, fit = jax.jit(partial(guess, model)), shape_of(examples)
    right, tokens = np.zeros(COLUMNS), 0
    for begin in range(0, len(examples) - BATCH + 1, BATCH):
        batch = {name: jnp.asarray(x) for name, x in collate(examples[begin : begin + BATCH], fit=fit).arrays.items()}
        expected, exists = (np.asarray(x) for x in wanted(batch))
        equal = (np.asarray(compute(params, columns, batch)).argmax(-1) == expected) & exists
        right += np.cumprod(equal, axis=0).sum((1, 2))
        tokens += int(exists[0].sum())
    return {"tokens": tokens, "right": [100 * float(x) / max(tokens, 1) for x in right]}


def shape_of(examples: Sequence[Encoded]) -> Callable[[tuple[int, int]], tuple[int, int]]:
    """A function that gives all batches the shape of the longest example."""
    longest = max(len(e.source) for e in examples), max(len(e.target.inputs) for e in examples)
    return lambda need: longest


if __name__ == "__main__":
    cli.run(main)
