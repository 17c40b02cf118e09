"""Attention in int8, in the encoder and to a source, equals softmax for constructed heads.

Its C++ runs as with VNNI. If this processor has no VNNI, `support/vnni/immintrin.h` computes its instructions.
"""

import ctypes
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipejax.kernels import cpu_kernel
from support import quantised

SUPPORT = Path(__file__).parent / "support" / "vnni"
FLAGS = "-O1 -ffp-contract=off -fno-gnu-unique -std=c++17 -shared -fPIC -w -Wno-psabi"
VNNI = "-D__AVX512F__ -D__AVX512VNNI__"
Head = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
UNLIKE = 0.01, 0.06  # relative to the largest value: root mean square and maximum for a head of random numbers

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="an x86's kernel, and GCC's vectors"
)


@pytest.fixture(scope="module")
def library(kernel_cache: Path) -> ctypes.CDLL:
    files = [*cpu_kernel.SOURCES, *sorted(SUPPORT.iterdir())]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files) + FLAGS.encode()).hexdigest()[:16]
    library = kernel_cache / f"attention-{digest}.so"
    if not library.exists():
        folders = [f"-I{SUPPORT}", f"-I{cpu_kernel.SOURCES[0].parent}"]
        made = library.with_suffix(".made")
        command = [
            "g++",
            *f"{FLAGS} -mavx2 -mfma {VNNI}".split(),
            *folders,
            str(SUPPORT / "attention.cc"),
            *(str(file) for file in cpu_kernel.SOURCES if file.name in ("blocks.cc", "products.cc")),
            "-o",
            str(made),
        ]
        subprocess.run(command, check=True, timeout=300)
        made.replace(library)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def attend(library: ctypes.CDLL) -> Callable[..., np.ndarray]:
    """A function from queries, keys, values [N, K] and a bias [2 N - 1] to [N, K]."""
    function = library.attend
    numbers, size = np.ctypeslib.ndpointer(np.float32, flags="C"), ctypes.c_int64
    function.argtypes, function.restype = [numbers, numbers, numbers, size, size, numbers, numbers], None

    def run(*head: np.ndarray) -> np.ndarray:
        queries, keys, values, bias = (np.ascontiguousarray(x, np.float32) for x in head)
        found = np.zeros_like(queries)
        function(queries, keys, values, *queries.shape, bias, found)
        return found

    return run


@pytest.fixture(scope="module")
def look(library: ctypes.CDLL) -> Callable[..., np.ndarray]:
    """A function from queries [M, K], keys and values [N, K] to [M, K], like the attention of a step to a source."""
    numbers, size = np.ctypeslib.ndpointer(np.float32, flags="C"), ctypes.c_int64
    library.look.argtypes, library.look.restype = [numbers, numbers, numbers, size, size, size, numbers, numbers], None

    def run(*head: np.ndarray) -> np.ndarray:
        queries, keys, values = (np.ascontiguousarray(x, np.float32) for x in head)
        found = np.zeros_like(queries)
        library.look(queries, keys, values, len(queries), *keys.shape, np.zeros_like(queries), found)
        return found

    return run


def softmax(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, bias: np.ndarray) -> np.ndarray:
    n, m = len(queries), len(keys)
    scores = queries @ keys.T + bias[np.arange(m) - np.arange(n)[:, None] + n - 1]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers @ values / powers.sum(axis=1, keepdims=True)


def by_level(*levels: tuple[int, float, float], width: int = 32) -> Head:
    """A head with equal queries: numbers of keys with a score each, and a value of which a hundredth differs."""
    scores, values = (np.repeat([level[i] for level in levels], [level[0] for level in levels]) for i in (1, 2))
    queries, keys = np.zeros((len(scores), width)), np.zeros((len(scores), width))
    queries[:, 0], keys[:, 0] = 1, scores
    channels = 1 + np.arange(width) / 100 / width
    return queries, keys, values[:, None] * channels, np.zeros(2 * len(scores) - 1)


def below(power: float) -> float:
    """The score whose power is a number of steps of 255, relative to a score of 10."""
    return 10 - float(np.log(255 / power))


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param([(1, 10, 10), (255, 3.7, 10), (255, -40, -10)], id="a tail beside keys that do not count"),
        pytest.param([(1, 10, 6), (255, 3.7, -6), (255, -40, 6)], id="the tail has the opposite value"),
        pytest.param([(1, 10, 1), (255, below(0.6), 1), (255, below(0.4), -1)], id="rounded up and to nothing"),
        pytest.param([(1, 10, 1), (255, below(1.45), 1), (255, below(1.55), -1)], id="rounded to one and to two"),
        pytest.param([(1, 10, 1), (1000, below(0.3), -1), (40, -40, 5)], id="a tail over several blocks"),
        pytest.param([(1, 10, 1), (600, below(0.45), -1), (1, 10, 1), (90, below(0.45), 3)], id="two peaks"),
        pytest.param([(1, 10, 1), (20, 2, 1), (500, -1e9, -30)], id="masked keys"),
        pytest.param([(1, 10, 1)], id="a single key"),
    ],
)
def test_small_powers_weigh_their_own_values(
    attend: Callable[..., np.ndarray], levels: list[tuple[int, float, float]]
) -> None:
    head = by_level(*levels)
    np.testing.assert_allclose(attend(*head), softmax(*head), atol=0.015 * np.abs(head[2]).max())


ROUNDING = 1 / 46  # the bound in blocks.cc for powers and values, relative to a channel's largest value
PEAKED = {
    f"{count} {depth} below, {values}": [(1, 10, 20 * at), (count, 10 - depth, 20), (*far, -20 if flat else 20)]
    for depth in (2.0, 5.0, 5.6, 6.2, 7.0, 8.8, 10.0, 11.0, 11.7)
    for values, at, flat in (("beside a zero", 0, True), ("against the peak", -1, False), ("as the peak", 1, True))
    for count, far in ((255, (255, -40)), (300, (300, -8)))
}


@pytest.mark.parametrize("levels", [pytest.param(levels, id=name) for name, levels in PEAKED.items()])
def test_tails_of_a_peak_are_within_the_stated_error(
    attend: Callable[..., np.ndarray], levels: list[tuple[int, float, float]]
) -> None:
    """Their numbers are equal in int8, so only powers and values are rounded."""
    head = by_level(*levels, width=16)
    off = np.abs(attend(*head) - softmax(*head)) / np.abs(head[2]).max(axis=0)
    assert off.max() < ROUNDING


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8, 12, 40, 100])
def test_error_of_first_digits_is_within_stated_bound(attend: Callable[..., np.ndarray], steps: int) -> None:
    """Powers differ from whole numbers by 1/256 steps, up for one value and down for the other."""
    up, down = below(1 + steps / 256), below(1 - steps / 256)
    head = by_level((1, 10, 0), (255, up, 1), (255, down, -1))
    off = np.abs(attend(*head) - softmax(*head)) / np.abs(head[2]).max(axis=0)
    assert off.max() < 1 / 128 + 2e-4


@pytest.mark.parametrize("highest", [3e3, 5e4, 3e5, 1e6, 1e7, 1e9, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
def test_softmax_depends_on_score_differences_at_any_size(
    attend: Callable[..., np.ndarray], highest: float, sign: int
) -> None:
    queries, keys, values, bias = random(100, 32)
    head = queries / 100, keys, values, np.round(bias) * max(2, 2e-6 * highest) + sign * np.float32(highest)
    off = np.abs(attend(*head) - softmax(*(np.float32(x).astype(float) for x in head)))
    assert off.max() < 0.03 * np.abs(values).max()


def balanced(queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The queries and keys that become int8: without the mean of keys, with equal average sizes in a channel."""
    keys = keys - keys.mean(axis=0)
    of_queries, of_keys = (np.sqrt(np.abs(x).mean(axis=0)) for x in (queries, keys))
    return queries * of_keys / of_queries, keys * of_queries / of_keys


def largest_error_of_scores(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The error [N, 1] of balanced queries and keys in int8, as stated in blocks.cc."""
    of_query, of_key = (np.abs(x).max(axis=1, keepdims=True) / 127 for x in (queries, keys))
    sizes = np.abs(queries).sum(axis=1, keepdims=True) * of_key.T + of_query * np.abs(keys).sum(axis=1)
    both = of_query * of_key.T * queries.shape[1] / 2
    return ((sizes + both) / 2).max(axis=1, keepdims=True) + 1e-4 + 1e-6 * np.abs(queries @ keys.T).max()


def error_of_ties(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The difference [N, 1] of scores that is possible if float32 and float64 round a number to different steps."""

    def steps(x: np.ndarray) -> np.ndarray:
        step = np.abs(x).max(axis=1, keepdims=True) / 127
        return np.where(np.abs(x / step % 1 - 0.5) < 1e-4, step, 0)

    scores = steps(queries) @ np.abs(keys).T + np.abs(queries) @ steps(keys).T
    return scores.max(axis=1, keepdims=True)


def drawn(rng: np.random.Generator) -> Head:
    """A head of any length and width, flat or peaked; the values of half of them depend on the scores."""
    n, width = int(np.exp(rng.uniform(np.log(2), np.log(600)))), int(rng.choice([16, 32, 48]))
    queries, keys, values = rng.standard_normal((3, n, width)) * np.exp(rng.uniform(-2, 2, (3, 1, width)))
    queries, bias = queries * rng.uniform(0, 1), rng.standard_normal(2 * n - 1) * rng.uniform(0, 8)
    # A few peaks, a tail that is 4 to 12 lower, no weight for every second offset, other values for every second key.
    if rng.random() < 0.5:
        queries, bias = queries / 50, bias / 80 - rng.uniform(4, 12)
        bias[::2] -= 30
        bias[rng.choice(2 * n - 1, 4)] = 0
        values = np.abs(values) ** rng.uniform(0, 1)
        values[::2] *= rng.choice([-1, 0])
    return queries, keys, values, bias


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_random_heads_are_within_the_stated_error(attend: Callable[..., np.ndarray], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        queries, keys, values, bias = head = drawn(rng)
        found, largest, near = attend(*head), np.abs(values).max(axis=0), balanced(queries, keys)
        error = 2 * np.tanh(largest_error_of_scores(*near) / 2)
        assert (np.abs(found - softmax(*head)) <= (error + ROUNDING) * largest).all()
        query, key = (quantised.narrow(x, 1) for x in near)
        rounded = softmax(query, key, values, bias)
        error = 2 * np.tanh(error_of_ties(*near) / 2)
        assert (np.abs(found - rounded) <= (error + ROUNDING) * largest).all()


def test_queries_computed_together_keep_their_own_digits(attend: Callable[..., np.ndarray]) -> None:
    """Of six queries that are computed together, some need a second digit, and all have different powers."""
    queries, keys, values, bias = by_level((1, 10, 10), (255, 3.7, 10), (255, -40, -10))
    queries[:, 0] = np.resize([0, 1, 0.95, 0, 1.1, 0.9, 1.05], len(queries))
    head = queries, keys, values, bias
    np.testing.assert_allclose(attend(*head), softmax(*head), atol=0.15)


def random(n: int = 150, width: int = 64) -> Head:
    rng = np.random.default_rng(0)
    queries, keys, values = rng.standard_normal((3, n, width))
    return queries / 2, keys, values, rng.standard_normal(2 * n - 1)


def spoil(head: Head, which: int, rows: Any, channels: Any, factor: float, add: float = 0.0) -> None:
    head[which][rows, channels] = head[which][rows, channels] * factor + add


UNEVEN = pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="random"),
        pytest.param([(1, 5, 100.0, 0.0), (0, 5, 0.01, 0.0)], id="keys"),
        pytest.param([(1, [5, 40], 1e4, 0.0), (0, [5, 40], 1e-4, 0.0)], id="two channels of keys"),
        pytest.param([(0, 5, 100.0, 0.0), (1, 5, 0.01, 0.0)], id="queries"),
        pytest.param([(2, 5, 100.0, 0.0)], id="values"),
        pytest.param([(1, 5, 1.0, 100.0)], id="keys have an offset"),
        pytest.param([(0, 5, 100.0, 0.0), (1, 5, 0.0, 0.0)], id="queries that meet no keys"),
        pytest.param([(1, 5, 100.0, 0.0), (0, 5, 0.0, 0.0)], id="keys that meet no queries"),
    ],
)


@UNEVEN
def test_channel_may_be_a_hundred_times_larger_than_others(
    attend: Callable[..., np.ndarray], changes: list[tuple[int, Any, float, float]]
) -> None:
    head = random()
    for which, channel, factor, add in changes:
        spoil(head, which, slice(None), channel, factor, add)
    off = (attend(*head) - softmax(*head)) / np.abs(head[2]).max(axis=0)
    assert np.sqrt((off**2).mean()) < UNLIKE[0] and np.abs(off).max() < UNLIKE[1]


@UNEVEN
@pytest.mark.parametrize("count", [1, 7, 60])
def test_channel_of_a_source_may_be_a_hundred_times_larger_than_others(
    look: Callable[..., np.ndarray], changes: list[tuple[int, Any, float, float]], count: int
) -> None:
    """Keys are laid out before the queries are known."""
    head = random()
    for which, channel, factor, add in changes:
        spoil(head, which, slice(None), channel, factor, add)
    queries, keys, values = head[0][:count], *head[1:3]
    off = look(queries, keys, values) - softmax(queries, keys, values, np.zeros(count + len(keys) - 1))
    off /= np.abs(values).max(axis=0)
    assert np.sqrt((off**2).mean()) < UNLIKE[0] / 2 and np.abs(off).max() < UNLIKE[1] / 2


@pytest.mark.parametrize("length", [400, 513, 2048, 4100])
@pytest.mark.parametrize("depth", [9.0, 10.8, 11.3, 12.5])
@pytest.mark.parametrize("value", [-1, 0])
def test_long_tail_of_source_is_attended(
    look: Callable[..., np.ndarray], length: int, depth: float, value: int
) -> None:
    """The tail has any number of keys, and the peak is at any place."""
    queries, keys, values = np.zeros((2, 16)), np.zeros((length, 16)), np.ones((length, 16))
    queries[:, 0], keys[:, 0], keys[length // 3, 0], values[length // 3] = (1, 0.99), -depth, 0, value
    off = look(queries, keys, values) - softmax(queries, keys, values, np.zeros(length + 1))
    assert np.abs(off).max() < 1 / 127 + 1 / 254


def test_token_of_a_source_may_be_a_hundred_times_larger_than_others(look: Callable[..., np.ndarray]) -> None:
    queries, keys, values, _ = head = random()
    spoil(head, 1, 7, 3, 100.0)
    off = (look(queries, keys, values) - softmax(*head[:3], np.zeros(299))) / np.abs(values).max(axis=0)
    assert np.sqrt((off[np.abs(queries[:, 3]) < 0.05] ** 2).mean()) < UNLIKE[0]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("trouble", [np.nan, np.inf])
def test_non_finite_source_values_reach_the_output(look: Callable[..., np.ndarray], which: int, trouble: float) -> None:
    head = random(40)[:3]
    head[which][11, 3] = trouble
    assert not np.isfinite(look(*head)[11, 3])


def test_token_may_be_a_hundred_times_larger_than_others(attend: Callable[..., np.ndarray]) -> None:
    """Other tokens keep their digits: most tokens determine a channel's size, not its largest number."""
    head = random()
    spoil(head, 1, 7, 3, 100.0)
    off = ((attend(*head) - softmax(*head)) / np.abs(head[2]).max(axis=0))[np.abs(head[0][:, 3]) < 0.05]
    assert len(off) and np.sqrt((off**2).mean()) < 2 * UNLIKE[0]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("trouble", [np.nan, np.inf])
def test_non_finite_values_reach_the_output(attend: Callable[..., np.ndarray], which: int, trouble: float) -> None:
    head = random(40)
    head[which][11, 3] = trouble
    assert not np.isfinite(attend(*head)[11, 3])
