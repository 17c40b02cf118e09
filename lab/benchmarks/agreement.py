"""Whether our own kernels for GPUs find what XLA finds: of a step its outputs, of a decode its tokens.

    python -m lab.benchmarks.agreement --model base --json OUT

The model has the sizes of --model and --layers layers on each side, with random weights. Everything is computed in
float32 and bfloat16, by XLA and by our kernels. Outputs of steps are the log-probabilities of the same forced tokens,
compared with those of XLA in float32: in float32 ours must lie within --tolerance, in bfloat16 on average no further
away than `WORSE` times as far as XLA's own. Of the tokens of greedy decodes a share of `EQUAL` must be XLA's in
float32: between two tokens that are equally likely either may decide otherwise, and what follows then differs. In
bfloat16, where that is frequent, the share is reported. On a GPU ours run in bfloat16 alone: in float32 decoding does
not use them, and there they multiply in TF32. Without a GPU they run as ordinary computations. Exits with 1 if they
disagree.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.benchmarks.decode import whole_numbers
from lab.benchmarks.peers.worker import error_line
from lab.benchmarks.systems import SIZES, machine, random_params, save
from pipejax.config import T5Config
from pipejax.decoding import GREEDILY, Decoded, DecodingOptions, Pipelined, Sequential
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.kernels import gpu
from pipejax.kernels.backends import Gpu
from pipejax.system import cli, compile_cache

WORSE = 2.0  # the mean of a few outputs varies by a quarter
EQUAL = 0.9  # of the tokens
DTYPES = ("bfloat16", "float32")
QUERIES = (1, 20, 40)  # of an example, in `gpu.trial`


def main(argv: Sequence[str]) -> int:
    """Compares, prints a line for each comparison, writes JSON after each."""
    parser = cli.Parser(prog="python -m lab.benchmarks.agreement", description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="base")
    parser.add_argument("--layers", type=cli.whole_number(1), default=2, metavar="N", help="of encoder and decoder (2)")
    parser.add_argument(
        "--source", type=cli.whole_number(1), default=128, metavar="L", help="tokens of each source (128)"
    )
    parser.add_argument("--batch", default="1,8", metavar="B,...", help="examples decoded together (1,8)")
    parser.add_argument("--rows", type=cli.whole_number(1), default=8, metavar="S", help="of the grid (8)")
    parser.add_argument("--times", type=cli.whole_number(2), default=24, metavar="T", help="steps of a decode (24)")
    parser.add_argument("--dtype", choices=DTYPES, help="alone (on a GPU bfloat16, elsewhere both)")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of log-probabilities in float32 (0.001)")
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    compile_cache.use_cache()
    interpret = jax.default_backend() != "gpu"
    config = dataclasses.replace(SIZES[flags.model], num_layers=flags.layers, num_decoder_layers=flags.layers)
    found: dict[str, Any] = {"machine": machine(1), "interpreted": interpret, "agrees": None, "results": []}
    found["command"] = "python -m lab.benchmarks.agreement " + " ".join(argv)

    def add(name: str, compute: Any) -> None:
        try:
            result = {"name": name, **compute()}
        except Exception as error:  # a kernel that does not compile, say: the others are compared all the same
            agrees = None if name.endswith("float32") else False
            result = {"name": name, "agrees": agrees, "error": error_line(error)}
        found["results"].append(result)
        print(", ".join(f"{key} {said(value)}" for key, value in result.items()), flush=True)
        found["agrees"] = all(r["agrees"] is not False for r in found["results"])
        if flags.json:
            save(flags.json, found)

    for queries in QUERIES:
        add(f"random numbers, {queries} queries", lambda: trial(queries, interpret))  # noqa: B023
    params = random_params(config)
    every = Four(config, params, Gpu(interpret=interpret))
    strategies = Pipelined(1, flags.times, flags.rows), Sequential(flags.times)
    for dtype, batch, strategy in itertools.product(
        [flags.dtype] if flags.dtype else DTYPES[: 1 + interpret], whole_numbers("--batch", flags.batch), strategies
    ):
        source = np.random.default_rng(1).integers(3, config.vocab_size, (batch, flags.source)).tolist()
        name = f"{type(strategy).__name__.lower()}, batch {batch}, {dtype}"
        add(f"outputs, {name}", lambda: every.outputs(dtype, source, strategy, flags.tolerance))  # noqa: B023
        add(f"tokens, {name}", lambda: every.tokens(dtype, source, strategy))  # noqa: B023
    return int(not found["agrees"])


def said(value: Any) -> str:
    """A value of a result, for people."""
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def trial(queries: int, interpret: bool) -> dict[str, Any]:
    """The comparison that decoding itself makes when a checkpoint is opened."""
    apart = float(jax.device_get(gpu.trial(queries, interpret=interpret)))
    return {"agrees": apart < gpu.TOLERANCE, "apart": apart}


class Four:
    """One T5 in float32 and bfloat16, by XLA and by our kernels."""

    def __init__(self, config: T5Config, params: Any, ours: Backend) -> None:
        """Lays the weights out; nothing compiles yet."""
        self.config = config
        self.programs: dict[tuple[str, Backend], Programs] = {}
        self.ours, device = ours, jax.local_devices()[:1]
        for dtype, backend in itertools.product(DTYPES, (XLA, ours)):
            self.programs[dtype, backend] = Programs(config, jnp.dtype(dtype), devices=device, backend=backend)
            self.programs[dtype, backend].set_params(params)

    def decode(
        self, dtype: str, backend: Backend, source: list[list[int]], strategy: Any, options: DecodingOptions
    ) -> Decoded:
        """What one of the four decodes."""
        return self.programs[dtype, backend].decode(
            source, strategy, batch_size=len(source), across=1, report=Report(), options=options
        )

    def outputs(self, dtype: str, source: list[list[int]], strategy: Any, tolerance: float) -> dict[str, Any]:
        """How far the log-probabilities of forced tokens are from those of XLA in float32."""
        shape = jax.eval_shape(lambda: strategy.result(strategy.init(len(source)))).tokens.shape
        forced = np.random.default_rng(2).integers(3, self.config.vocab_size, shape, np.int32)
        options = DecodingOptions(forced=forced, scores=True)

        def scores(dtype: str, backend: Backend) -> np.ndarray:
            return np.asarray(self.decode(dtype, backend, source, strategy, options).log_probs)

        truth = scores("float32", XLA)
        ours = np.abs(scores(dtype, self.ours) - truth)
        assert truth.any(), "nothing was decoded"
        if dtype == "float32":
            return {"agrees": bool(ours.max() <= tolerance), "apart": float(ours.max())}
        theirs = np.abs(scores(dtype, XLA) - truth)
        of_ours, of_theirs = float(ours.mean()), float(theirs.mean())
        return {"agrees": of_ours <= WORSE * of_theirs, "apart": of_ours, "apart_xla": of_theirs}

    def tokens(self, dtype: str, source: list[list[int]], strategy: Any) -> dict[str, Any]:
        """The share of the tokens of greedy decodes that are XLA's."""
        ours, theirs = (self.decode(dtype, x, source, strategy, GREEDILY) for x in (self.ours, XLA))
        place = np.arange(ours.tokens.shape[2])
        both = place < np.minimum(ours.lengths, theirs.lengths)[..., None]
        longest = int(np.maximum(ours.lengths, theirs.lengths).sum())
        equal = float((both & (ours.tokens == theirs.tokens)).sum() / longest)
        return {"agrees": dtype != "float32" or equal >= EQUAL, "equal": equal}


if __name__ == "__main__":
    cli.run(main)
