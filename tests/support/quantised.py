"""The definition of the T5 with rounded weights: rounding in NumPy, then the exact arithmetic of `oracle`."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from support import oracle

Params = dict[str, Any]
TWO_DIGITS = 127 * 256 + 127  # steps of the largest number


def bfloat16(x: Any) -> np.ndarray:
    """Rounds numbers to bfloat16; returns them in float64."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def rounded(params: Params, weights: str) -> Params:
    """Rounds float32 parameters; returns them in float64.

    An int8 matrix has one scale for each output, with 17 significant bits: the largest magnitude of its inputs / 127.
    """
    flat = flatten_dict(params, sep="/")
    for path, x in flat.items():
        exact = np.asarray(x).astype(np.float64)
        is_matrix = path.endswith(("/kernel", "/embedding")) and "relative_bias" not in path
        if is_matrix and weights == "bfloat16":
            exact = bfloat16(x)
        if is_matrix and weights == "int8":
            most = np.abs(np.asarray(x)).max(axis=1 if path.endswith("embedding") else 0, keepdims=True)
            mantissa, exponent = np.frexp((most * np.float32(1 / 127)).astype(np.float64))
            scale = np.ldexp(np.round(mantissa * 2**17) / 2**17, exponent)
            exact = np.round(exact / np.where(scale == 0, 1, scale)) * scale
        flat[path] = exact
    return unflatten_dict(flat, sep="/")


def one_digit(x: np.ndarray) -> np.ndarray:
    """Rounds columns [N, inputs] to steps, one size for each column; a few outliers have more steps than int8.

    127 steps are the largest number divided by 2^(j / 4). j is the greatest number up to 15 for which at most `most`
    numbers have more than 127 steps, and at most half of `most` of the maxima over every 64th input.
    """
    size, most, found = np.abs(x).astype(np.float32), max(4, x.shape[1] // 128), []
    maxima = np.pad(size, ((0, 0), (0, -x.shape[1] % 64))).reshape(len(x), -1, 64).max(axis=1)
    for column, sizes, maximum in zip(x, size, maxima, strict=True):
        ranges = sizes.max() * np.exp2(-np.arange(16) / 4).astype(np.float32)
        steps = [float(most_of) / 127 or 1.0 for most_of in ranges]
        numbers = [np.round(column / step) for step in steps]
        outside = [(number != np.clip(number, -128, 127)).sum() for number in numbers]
        j = max(j for j in range(16) if (maximum > ranges[j]).sum() <= most // 2)
        j = max(i for i in range(j + 1) if outside[i] <= most)
        found.append(numbers[j] * steps[j])
    return np.array(found)


@contextlib.contextmanager
def activations(rounding: Any) -> Iterator[None]:
    """A context in which `oracle` rounds the input of each matrix except the head."""
    exact, head = oracle.linear, oracle.head

    def linear(x: np.ndarray, layer: Params) -> np.ndarray:
        return exact(x if "picks" in layer else rounding(x), layer)

    def exact_head(*given: Any) -> np.ndarray:
        with mock.patch.object(oracle, "linear", exact):
            return head(*given)

    with mock.patch.object(oracle, "linear", linear), mock.patch.object(oracle, "head", exact_head):
        yield


def narrow(x: np.ndarray, axis: int, steps: int = 127) -> np.ndarray:
    """Rounds to int8 or two int8 digits, with a scale along an axis by which the largest number has `steps` steps."""
    most = np.abs(x).max(axis=axis, keepdims=True)
    step = np.where(most == 0, 1, most / steps)
    return np.round(x / step) * step


@contextlib.contextmanager
def attention_in_blocks(block: int = 512) -> Iterator[None]:
    """A context with `oracle.attend` by blocks of keys in int8.

    There is a scale for each query, each key and each output of a block's values. Before that, the mean of keys is
    subtracted, and queries and keys are scaled to equal average sizes in each channel. The powers of a query in a block
    have steps of 1 / 256, with 255 as the largest. The remainders of this rounding weigh the mean of the block's values
    if a bound of the resulting error is at most 1 / 128 of a channel's largest value, and otherwise each value.
    """

    def attend(
        x: np.ndarray, memory: np.ndarray, params: Params, config: Any, *, bias: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        def heads(of: np.ndarray, name: str) -> np.ndarray:
            return oracle.linear(of, params[name]).reshape(-1, config.num_heads, config.d_kv).swapaxes(0, 1)

        assert mask.all()
        query, key, value = heads(x, "query"), heads(memory, "key"), heads(memory, "value")
        key = key - key.mean(axis=1, keepdims=True)
        sizes = (np.sqrt(np.abs(of).mean(axis=1, keepdims=True)) for of in (query, key))
        of_query, of_key = (np.where(size < 1e-15, 0, size) for size in sizes)
        ratio = np.divide(of_key, of_query, out=np.zeros_like(of_key), where=of_query > 0)
        back = np.divide(of_query, of_key, out=np.zeros_like(of_key), where=of_key > 0)
        query, key = narrow(query * ratio, 2), narrow(key * back, 2)
        scores = query @ key.swapaxes(1, 2) + bias
        highest, found, total = (
            scores.max(axis=2, keepdims=True),
            np.zeros(query.shape),
            np.zeros((*query.shape[:2], 1)),
        )
        for keys in (slice(at, at + block) for at in range(0, len(memory), block)):
            most = scores[:, :, keys].max(axis=2, keepdims=True)
            powers, values = np.round(256 * 255 * np.exp(scores[:, :, keys] - most)) / 256, value[:, keys]
            rest = powers - np.floor(powers + 1 / 2)
            largest = np.abs(values).max(axis=1, keepdims=True)
            apart = (values - values.mean(axis=1, keepdims=True)) / np.where(largest == 0, 1, largest)
            farthest, spread = np.abs(apart).max(axis=(1, 2)), np.linalg.norm(apart, axis=1).max(axis=1)
            sizes = np.minimum(np.abs(rest), 127 / 256)
            bounds = sizes.sum(axis=2).T * farthest, np.linalg.norm(sizes, axis=2).T * spread
            fine = np.minimum(*bounds).T[:, :, None] > powers.sum(axis=2, keepdims=True) / 130
            digits = np.where(fine, powers, powers - rest)
            lost = np.where(fine, 0, rest.sum(axis=2, keepdims=True)) * values.mean(axis=1, keepdims=True)
            found += np.exp(most - highest) * (digits @ narrow(values, 1) + lost)
            total += np.exp(most - highest) * powers.sum(axis=2, keepdims=True)
        return oracle.linear((found / total).swapaxes(0, 1).reshape(len(x), -1), params["output"])

    with mock.patch.object(oracle, "attend", attend):
        yield


@contextlib.contextmanager
def sources_in_two_digits() -> Iterator[None]:
    """A context with the `oracle.attend` of `logits`: queries, and powers of scores of 512 keys, have two digits."""
    exact = oracle.attend

    def attend(
        x: np.ndarray, memory: np.ndarray, params: Params, config: Any, *, bias: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        if "picks" not in params["key"]:
            return exact(x, memory, params, config, bias=bias, mask=mask)

        def heads(of: np.ndarray, name: str) -> np.ndarray:
            return oracle.linear(of, params[name]).reshape(-1, config.num_heads, config.d_kv).swapaxes(0, 1)

        assert mask.all()
        scores = narrow(heads(x, "query"), 2, TWO_DIGITS) @ heads(memory, "key").swapaxes(1, 2) + bias
        powers = np.exp(scores - scores.max(axis=2, keepdims=True))
        parts = [narrow(powers[:, :, at : at + 512], 2, TWO_DIGITS) for at in range(0, len(memory), 512)]
        found = np.concatenate(parts, axis=2) @ heads(memory, "value") / powers.sum(axis=2, keepdims=True)
        return oracle.linear(found.swapaxes(0, 1).reshape(len(x), -1), params["output"])

    with mock.patch.object(oracle, "attend", attend):
        yield


def memory(params: Params, config: Any, ids: Sequence[int]) -> np.ndarray:
    """The memory of a source of L tokens: keys and values [layers, 2, L, I] of the decoder's layers."""
    encoded = oracle.encode(params, config, ids)
    layers = [params["decoder"][f"layers_{i}"]["cross_attention"] for i in range(config.num_decoder_layers)]
    return np.array([[oracle.linear(encoded, layer[name]) for name in ("key", "value")] for layer in layers])


def logits(
    params: Params, config: Any, seen: np.ndarray, tokens: Sequence[int], visible: np.ndarray, distance: np.ndarray
) -> np.ndarray:
    """The decoder's logits [N, V] like `oracle.decoder_logits`, from keys and values [layers, 2, L, I]."""
    layers, _, length, inner = seen.shape
    picked, decoder = np.eye(layers * 2 * inner).reshape(-1, layers, 2, inner), dict(params["decoder"])
    for i in range(layers):
        cross = {name: {"kernel": picked[:, i, j], "picks": True} for j, name in enumerate(("key", "value"))}
        layer = decoder[f"layers_{i}"]
        decoder[f"layers_{i}"] = {**layer, "cross_attention": {**layer["cross_attention"], **cross}}
    side_by_side = seen.transpose(2, 0, 1, 3).reshape(length, -1)
    params = {**params, "decoder": decoder}
    return oracle.decoder_logits(params, config, side_by_side, tokens, visible.tolist(), distance.tolist())
