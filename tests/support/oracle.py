"""The reference for the decoder: T5 and Algorithm 1 from their definitions, clear and slow.

The module uses NumPy in float64 and plain lists, and no code of the package. It has no padding, no batches and no
cache. Rows are 0-based; time 0 is the bos of the first row. `config` is any object with the attributes of a T5Config.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Params = dict[str, Any]
NextTokens = Callable[[list[list[int]]], list[int]]
Distances = Callable[[Sequence[tuple[int, int]]], list[list[int]]]  # maps (row, time) pairs to a list for each query


def random_params(
    config: Any, rng: np.random.Generator, *, scale: float = 1.0, bias_scale: float = 4.0, eos_scale: float = 1.5
) -> Params:
    """Parameters of a tiny T5 with varied greedy answers, as a nested dict of float32 arrays.

    The parameters do not resemble trained weights. A T5 with the usual initialisation repeats one token forever: a head
    that resembles the embedding prefers the last token, and a history of equal tokens looks the same from all
    positions. Therefore the decoder's last norm has a negative scale here, which makes every token lower the logit of
    its repetition, and self-attention has large logits that depend on distances more than on contents.

    Args:
      config: the architecture.
      rng: the generator of all random numbers.
      scale: multiplies the standard deviation of every kernel in the blocks; with a small scale, the next token depends
        almost only on the last token.
      bias_scale: standard deviation of the relative position biases of encoder and decoder.
      eos_scale: multiplies the head's vectors of end tokens (their embeddings, if tied); longer vectors make end tokens
        more frequent.
    """
    width, inner = config.d_model, config.num_heads * config.d_kv

    def normal(*shape: int, std: float) -> np.ndarray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    def kernel(n_in: int, n_out: int, gain: float = 1.0) -> Params:
        return {"kernel": normal(n_in, n_out, std=scale * gain * n_in**-0.5)}

    def norm(sign: float = 1.0) -> Params:
        return {"scale": (sign + 0.2 * rng.standard_normal(width)).astype(np.float32)}

    def attention(gain: float) -> Params:
        return {
            "norm": norm(),
            "query": kernel(width, inner, 0.7),
            "key": kernel(width, inner, 0.7),
            "value": kernel(width, inner),
            "output": kernel(inner, width, gain),
        }

    def feed_forward() -> Params:
        names = ["wi"] if config.feed_forward == "relu" else ["wi_0", "wi_1"]
        inputs = {name: kernel(width, config.d_ff) for name in names}
        return {"norm": norm(), **inputs, "wo": kernel(config.d_ff, width)}

    def relative_bias() -> Params:
        return {"embedding": normal(config.relative_attention_num_buckets, config.num_heads, std=bias_scale)}

    embedding = normal(config.vocab_size, width, std=1.5)
    encoder: Params = {"relative_bias": relative_bias(), "norm": norm()}
    for layer in range(config.num_layers):
        encoder[f"layers_{layer}"] = {"attention": attention(gain=3.0), "feed_forward": feed_forward()}
    decoder: Params = {"relative_bias": relative_bias(), "norm": norm(sign=-1.0)}
    for layer in range(config.num_decoder_layers):
        decoder[f"layers_{layer}"] = {
            "self_attention": attention(gain=3.0),
            "cross_attention": attention(gain=1.0),
            "feed_forward": feed_forward(),
        }
    params: Params = {"shared": {"embedding": embedding}, "encoder": encoder, "decoder": decoder}
    ends = [*ends_of(config)]
    if config.tied_head:
        embedding[ends] *= eos_scale
    else:
        head = embedding.T + normal(width, config.vocab_size, std=1.0)
        head[:, ends] *= eos_scale
        params["lm_head"] = {"kernel": head}
    return params


def ends_of(config: Any) -> tuple[int, ...]:
    """The tokens that end a row."""
    return config.eos_token_id, *getattr(config, "other_eos_token_ids", ())


def linear(x: np.ndarray, layer: Params) -> np.ndarray:
    """The product of x [N, in] and a kernel [in, out], computed in float64, since x is float64."""
    result: np.ndarray = x @ layer["kernel"]
    return result


def distance_bucket(distance: int, buckets: int, max_distance: int) -> int:
    """T5's bucket of a distance >= 0: one bucket for each small distance, then logarithmic up to `max_distance`.

    With e exact buckets of n, the bucket is e + floor((n - e) * log(d / e) / log(max_distance / e)). The function
    compares whole numbers instead, so that rounding has no effect at the edges: the floor is at least j if
    (d / e)^(n - e) >= (max_distance / e)^j.
    """
    exact = buckets // 2
    if distance < exact:
        return distance
    extra, j = buckets - exact, 0
    while j + 1 < extra and distance**extra * exact ** (j + 1) >= max_distance ** (j + 1) * exact**extra:
        j += 1
    return exact + j


def encoder_bucket(query: int, key: int, buckets: int, max_distance: int) -> int:
    """T5's bidirectional bucket: keys to the right of the query have the upper half of the buckets."""
    half = buckets // 2
    return distance_bucket(abs(key - query), half, max_distance) + (half if key > query else 0)


def rms_norm(x: np.ndarray, params: Params, config: Any) -> np.ndarray:
    """Divides x [N, D] by its root mean square, and multiplies by the scale; returns [N, D]."""
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    result: np.ndarray = x / np.sqrt(mean_square + config.layer_norm_epsilon) * params["scale"]
    return result


def attend(
    x: np.ndarray, memory: np.ndarray, params: Params, config: Any, *, bias: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Attention of x [N, D] to memory [M, D]; bias is [H, N, M], mask [N, M] is True for visible keys."""

    def heads(values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, config.num_heads, config.d_kv).transpose(1, 0, 2)

    query = heads(linear(x, params["query"]))
    key = heads(linear(memory, params["key"]))
    value = heads(linear(memory, params["value"]))
    scores = np.where(mask, query @ key.transpose(0, 2, 1) + bias, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    merged = (weights @ value).transpose(1, 0, 2).reshape(len(x), config.num_heads * config.d_kv)
    return linear(merged, params["output"])


def feed_forward(x: np.ndarray, params: Params, config: Any) -> np.ndarray:
    """T5's feed-forward layer for the normalised x [N, D]; returns [N, D]."""
    if config.feed_forward == "relu":
        return linear(np.maximum(linear(x, params["wi"]), 0.0), params["wo"])
    gate = linear(x, params["wi_0"])
    if config.feed_forward == "gated-gelu":
        gate = 0.5 * gate * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)))
    elif config.feed_forward == "gated-silu":
        gate = gate / (1.0 + np.exp(-gate))
    else:
        raise ValueError(f"unknown feed_forward {config.feed_forward!r}")
    return linear(gate * linear(x, params["wi_1"]), params["wo"])


def encode(params: Params, config: Any, ids: Sequence[int]) -> np.ndarray:
    """The encoder's output [L, D] for the L source ids."""
    buckets, max_distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    positions = range(len(ids))
    bucket = np.array([[encoder_bucket(q, k, buckets, max_distance) for k in positions] for q in positions])
    bias = params["encoder"]["relative_bias"]["embedding"][bucket].transpose(2, 0, 1)
    everything = np.ones((len(ids), len(ids)), bool)

    x = params["shared"]["embedding"][list(ids)].astype(np.float64)
    for i in range(config.num_layers):
        layer = params["encoder"][f"layers_{i}"]
        h = rms_norm(x, layer["attention"]["norm"], config)
        x = x + attend(h, h, layer["attention"], config, bias=bias, mask=everything)
        h = rms_norm(x, layer["feed_forward"]["norm"], config)
        x = x + feed_forward(h, layer["feed_forward"], config)
    return rms_norm(x, params["encoder"]["norm"], config)


def decoder_logits(
    params: Params,
    config: Any,
    encoded: np.ndarray,
    tokens: Sequence[int],
    visible: Sequence[Sequence[bool]],
    distance: Sequence[Sequence[int]],
) -> np.ndarray:
    """The decoder's logits [N, V] for a flat list of N tokens.

    Args:
      encoded: the encoder's output [L, D], without padding.
      tokens: N ids.
      visible: N x N; `visible[q][k]` is whether token q sees token k.
      distance: N x N, `distance[q][k]` >= 0, which counts as a distance to the left. Entries for keys that are not
        visible have no effect.
    """
    buckets, max_distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    farthest = max(max(row) for row in distance)
    bucket_of = np.array([distance_bucket(d, buckets, max_distance) for d in range(farthest + 1)])
    bucket = bucket_of[np.array(distance)]
    bias = params["decoder"]["relative_bias"]["embedding"][bucket].transpose(2, 0, 1)
    mask = np.array(visible, bool)
    everything = np.ones((len(tokens), len(encoded)), bool)
    no_bias = np.zeros((config.num_heads, len(tokens), len(encoded)))

    x = params["shared"]["embedding"][list(tokens)].astype(np.float64)
    for i in range(config.num_decoder_layers):
        layer = params["decoder"][f"layers_{i}"]
        h = rms_norm(x, layer["self_attention"]["norm"], config)
        x = x + attend(h, h, layer["self_attention"], config, bias=bias, mask=mask)
        h = rms_norm(x, layer["cross_attention"]["norm"], config)
        x = x + attend(h, encoded, layer["cross_attention"], config, bias=no_bias, mask=everything)
        h = rms_norm(x, layer["feed_forward"]["norm"], config)
        x = x + feed_forward(h, layer["feed_forward"], config)
    x = rms_norm(x, params["decoder"]["norm"], config)
    return head(x, params, config)


def head(x: np.ndarray, params: Params, config: Any) -> np.ndarray:
    if config.scale_head:
        x = x * config.d_model**-0.5
    return linear(x, {"kernel": params["shared"]["embedding"].T} if config.tied_head else params["lm_head"])


def coordinates(rows: Sequence[Sequence[int]], delay: int) -> list[tuple[int, int]]:
    """The (row, time) of every token, row after row. Token j of row i is at (i, i * delay + j), with bos at j = 0."""
    return [(i, i * delay + j) for i, row in enumerate(rows) for j in range(len(row))]


def visibility(cells: Sequence[tuple[int, int]]) -> list[list[bool]]:
    """Whether token q sees token k, as `[q][k]`: rows up to its row, times up to its time (paper, G_{<=i}^{<=t})."""
    return [[k_row <= q_row and k_time <= q_time for k_row, k_time in cells] for q_row, q_time in cells]


def distances(cells: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The Manhattan distances as `[q][k]`."""
    return [[abs(q_row - k_row) + abs(q_time - k_time) for k_row, k_time in cells] for q_row, q_time in cells]


def grid_logits(
    params: Params,
    config: Any,
    encoded: np.ndarray,
    rows: Sequence[Sequence[int]],
    delay: int,
    distances: Distances = distances,
) -> list[np.ndarray]:
    """The logits after every token, as an array [length of the row, V] for each row."""
    cells = coordinates(rows, delay)
    tokens = [token for row in rows for token in row]
    flat = decoder_logits(params, config, encoded, tokens, visibility(cells), distances(cells))
    split: list[np.ndarray] = []
    for row in rows:
        split.append(flat[: len(row)])
        flat = flat[len(row) :]
    return split


def teacher_forced_loss(
    params: Params,
    config: Any,
    source_ids: Sequence[int],
    rows: Sequence[Sequence[int]],
    delay: int,
    *,
    empty_row: bool = True,
    distances: Distances = distances,
) -> float:
    """The mean loss of an example over its sum(m_i + 1) + 1 targets (paper, equation 6).

    Args:
      rows: the target rows without bos and eos.
      empty_row: whether the empty row is appended, which is the case unless the target was truncated.
      distances: gives the distances of cells.
    """
    bos, eos = config.decoder_start_token_id, config.eos_token_id
    layout = [[bos, *row, eos] for row in rows]
    if empty_row:
        layout.append([bos, eos])
    encoded = encode(params, config, source_ids)
    losses = []
    for row, logits in zip(layout, grid_logits(params, config, encoded, layout, delay, distances), strict=True):
        for j in range(len(row) - 1):
            shifted = logits[j] - logits[j].max()
            losses.append(np.log(np.exp(shifted).sum()) - shifted[row[j + 1]])
    return float(np.mean(losses))


@dataclasses.dataclass(frozen=True)
class GridResult:
    """The result of Algorithm 1, and the reason why it stopped."""

    rows: list[list[int]]  # without bos and eos, and without empty rows
    all_rows: list[list[int]]  # with bos and eos, at the time when the algorithm stopped
    steps: int  # time-steps, including those without an open row
    calls: int  # time-steps with an open row, which call the decoder
    truncated: str | None  # None, "time_max" or "sub_max"


@dataclasses.dataclass(frozen=True)
class SequentialResult:
    """The result of ordinary greedy decoding."""

    tokens: list[int]  # without bos and eos
    steps: int  # generated tokens, eos included
    truncated: str | None  # None or "max_length"


def algorithm1(
    next_tokens: NextTokens,
    *,
    delay: int,
    time_max: int,
    sub_max: int,
    stop: str,
    bos: int = 0,
    eos: int | Sequence[int] = 1,
    prefixes: Sequence[Sequence[int]] = (),
    unique: bool = False,
) -> GridResult:
    """Algorithm 1 of the paper.

    Args:
      next_tokens: maps the rows so far (bos, tokens and, if the row has ended, eos) to the next token of each row;
        the token of an ended row is ignored.
      delay: time-steps between the starts of two rows. With 0, which the paper does not have, exactly `sub_max` rows
        are open from the beginning.
      time_max: most time-steps.
      sub_max: most rows.
      stop: "literal" is the paper's rule: stop as soon as all rows have ended. "empty_row": no row starts after an
        empty row, and decoding stops when no row can start and all rows have ended. Only an empty row or `sub_max` ends
        the starting of rows: if a row would start after `time_max`, decoding ends at `time_max`.
      eos: the token that ends a row, or several such tokens.
      prefixes: the first tokens of the first rows, which replace the model's tokens.
      unique: whether only the first of equal rows is in the result. With "empty_row", no row starts after two adjacent
        rows that have ended and each equal an earlier row.
    """
    if stop not in ("literal", "empty_row"):
        raise ValueError(f"stop: found {stop!r}; expected 'literal' or 'empty_row'")

    ends = (eos,) if isinstance(eos, int) else eos

    def ended(row: list[int]) -> bool:
        return row[-1] in ends

    def repeats(i: int) -> bool:
        return ended(rows[i]) and any(ended(rows[j]) and rows[i][:-1] == rows[j][:-1] for j in range(i))

    rows: list[list[int]] = []
    empty_row_seen = in_circles = False
    steps = calls = 0
    for t in range(1, time_max + 1):
        steps = t
        may_start = len(rows) < sub_max and not (stop == "empty_row" and (empty_row_seen or in_circles))
        if delay == 0 and t == 1:
            rows = [[bos] for _ in range(sub_max)]
        elif delay > 0 and (t - 1) % delay == 0 and may_start:
            rows.append([bos])
        if not all(ended(row) for row in rows):
            calls += 1
            # The token of every row follows from the rows before this step.
            generated = next_tokens([list(row) for row in rows])
            for i, prefix in enumerate(prefixes[: len(rows)]):
                if len(rows[i]) <= len(prefix):
                    generated[i] = prefix[len(rows[i]) - 1]
            for row, token in zip(rows, generated, strict=True):
                if not ended(row):
                    row.append(token)
        empty_row_seen = any(len(row) == 2 and ended(row) for row in rows)
        if unique and stop == "empty_row":
            in_circles = any(repeats(i) and repeats(i + 1) for i in range(len(rows) - 1))
        no_more_rows = delay == 0 or stop == "literal" or empty_row_seen or in_circles or len(rows) == sub_max
        if no_more_rows and all(ended(row) for row in rows):
            break

    truncated: str | None
    if not all(ended(row) for row in rows):
        truncated = "time_max"
    elif empty_row_seen or in_circles or delay == 0:
        truncated = None
    elif len(rows) == sub_max:
        truncated = "sub_max"
    else:
        truncated = "time_max" if stop == "empty_row" else None
    # Only the first bos and the last eos are markers; if a model generates the id of bos, the token is kept.
    contents = [row[1:-1] if ended(row) else row[1:] for row in rows]
    if unique:
        contents = [row for i, row in enumerate(contents) if row not in contents[:i]]
    return GridResult([row for row in contents if row], rows, steps, calls, truncated)


def scripted_next_tokens(targets: Sequence[Sequence[int]], *, eos: int = 1) -> NextTokens:
    """Returns for `algorithm1` a model that writes these rows, and eos after each of them and in all further rows."""

    def says(i: int, position: int) -> int:
        return targets[i][position] if i < len(targets) and position < len(targets[i]) else eos

    return lambda rows: [says(i, len(row) - 1) for i, row in enumerate(rows)]


def grid_next_tokens(
    params: Params,
    config: Any,
    encoded: np.ndarray,
    delay: int,
    *,
    margins: list[float] | None = None,
    distances: Distances = distances,
) -> NextTokens:
    """Returns for `algorithm1` the greedy choices of the T5, computed from all tokens again at every step.

    Args:
      margins: gets the difference between the best and the second logit for each choice of an open row. If it is small,
        another precision may choose another token.
      distances: gives the distances of cells.
    """

    def next_tokens(rows: list[list[int]]) -> list[int]:
        chosen = []
        for row, logits in zip(rows, grid_logits(params, config, encoded, rows, delay, distances), strict=True):
            chosen.append(int(np.argmax(logits[-1])))
            if margins is not None and row[-1] not in ends_of(config):
                margins.append(margin(logits[-1]))
        return chosen

    return next_tokens


def sequential(
    params: Params, config: Any, encoded: np.ndarray, max_length: int, *, margins: list[float] | None = None
) -> SequentialResult:
    """Decodes greedily with causal visibility and the distance |q - k|, up to `max_length` tokens."""
    tokens = [config.decoder_start_token_id]
    while len(tokens) - 1 < max_length:
        positions = range(len(tokens))
        visible = [[k <= q for k in positions] for q in positions]
        distance = [[abs(q - k) for k in positions] for q in positions]
        logits = decoder_logits(params, config, encoded, tokens, visible, distance)[-1]
        if margins is not None:
            margins.append(margin(logits))
        tokens.append(int(np.argmax(logits)))
        if tokens[-1] in ends_of(config):
            return SequentialResult(tokens[1:-1], len(tokens) - 1, None)
    return SequentialResult(tokens[1:], len(tokens) - 1, "max_length")


def margin(logits: np.ndarray) -> float:
    second, best = np.sort(logits)[-2:]
    return float(best - second)


def pipelined_steps(lengths: Sequence[int], delay: int, sub_max: int, time_max: int) -> int:
    """The time-steps with the default stop, for rows of these lengths (tokens without bos and eos, none empty)."""
    rows = lengths[:sub_max]
    steps = [i * delay + length + 1 for i, length in enumerate(rows)]
    if len(rows) < sub_max:
        steps.append(len(rows) * delay + 1)  # the empty row
    return min(max(steps), time_max)
