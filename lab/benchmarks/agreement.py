"""Compares our own kernels for GPUs with XLA: the outputs of steps and the tokens of decodes.

Everything is computed in float32 and bfloat16, by XLA and by our kernels. The outputs of steps are the log-
probabilities of the same forced tokens, and XLA in float32 is the reference. In float32, the differences of our kernels
must be within a tolerance. In bfloat16, their mean must be at most `WORSE` times the mean difference of XLA. In greedy
decodes in float32, a share of at least `EQUAL` of the tokens must equal XLA's; where two tokens are equally likely,
both computations may choose differently, and the following tokens then differ. In bfloat16, where such ties are
frequent, the share is only reported. On a GPU our kernels run in bfloat16 only: decoding in float32 does not use them,
and they would multiply in TF32. Without a GPU they run as ordinary computations.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.config import T5Config
from pipejax.decoding import GREEDILY, Decoded, DecodingOptions
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.kernels import gpu

WORSE = 2.0  # the mean of a few outputs varies by a quarter
EQUAL = 0.9  # of the tokens
DTYPES = ("bfloat16", "float32")
QUERIES = (1, 20, 40)  # of an example, in `gpu.trial`


def trial(queries: int, interpret: bool) -> dict[str, Any]:
    """Makes the comparison that pipejax makes when it opens a checkpoint for decoding."""
    apart = float(jax.device_get(gpu.trial(queries, interpret=interpret)))
    return {"agrees": apart < gpu.TOLERANCE, "apart": apart}


class Four:
    """One T5 in four forms: in float32 and bfloat16, computed by XLA and by our kernels."""

    def __init__(self, config: T5Config, params: Any, ours: Backend) -> None:
        """Prepares the weights. Programs compile when they are first used."""
        self.config = config
        self.programs: dict[tuple[str, Backend], Programs] = {}
        self.ours, device = ours, jax.local_devices()[:1]
        for dtype, backend in itertools.product(DTYPES, (XLA, ours)):
            self.programs[dtype, backend] = Programs(config, jnp.dtype(dtype), devices=device, backend=backend)
            self.programs[dtype, backend].set_params(params)

    def decode(
        self, dtype: str, backend: Backend, source: list[list[int]], strategy: Any, options: DecodingOptions
    ) -> Decoded:
        """The answers that one of the four forms decodes."""
        return self.programs[dtype, backend].decode(
            source, strategy, batch_size=len(source), across=1, report=Report(), options=options
        )

    def outputs(self, dtype: str, source: list[list[int]], strategy: Any, tolerance: float) -> dict[str, Any]:
        """The differences between the log-probabilities of forced tokens and those of XLA in float32."""
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
        """The share of tokens in greedy decodes that equal XLA's tokens."""
        ours, theirs = (self.decode(dtype, x, source, strategy, GREEDILY) for x in (self.ours, XLA))
        place = np.arange(ours.tokens.shape[2])
        both = place < np.minimum(ours.lengths, theirs.lengths)[..., None]
        longest = int(np.maximum(ours.lengths, theirs.lengths).sum())
        equal = float((both & (ours.tokens == theirs.tokens)).sum() / longest)
        return {"agrees": dtype != "float32" or equal >= EQUAL, "equal": equal}
