"""A decoding step of T5 that is written by hand in PyTorch and captured in a CUDA graph: the peer to beat on a GPU.

One example of T5 v1.0. A step embeds its queries, writes their keys and values into the cache, attends with PyTorch's
fused kernel, and takes the likeliest tokens, which are the next step's queries. The host replays the steps of an answer
without waiting, so they are timed together. There is no encoder, no end of an answer and no choice of rows. Without a
GPU the same step is called, and not captured.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pipejax.config import T5Config


def measured(step: "Step", steps: int, rounds: int = 5) -> float:
    """Seconds of a step: of the fastest of some answers."""
    call, times = step.captured(), []
    for _ in range(rounds):
        step.begin()
        step.wait()
        begun = time.perf_counter()
        for _ in range(steps):
            call()
        step.wait()
        times.append((time.perf_counter() - begun) / steps)
    return min(times)


class Step:
    """The weights, the cache and the queries of an example, on a device."""

    def __init__(
        self,
        config: T5Config,
        params: Any,
        queries: int,
        source: int,
        slots: int,
        *,
        device: str,
        dtype: str = "bfloat16",
        seed: int = 0,
    ) -> None:
        """Of random encoded tokens [source, D] (`memory`)."""
        import torch

        assert config.feed_forward == "relu" and config.tied_head, "T5 v1.0"
        self.torch, self.config, self.device, self.queries = torch, config, device, queries
        rng = np.random.default_rng(seed)
        self.memory = rng.standard_normal((source, config.d_model), np.float32)

        def put(*arrays: Any) -> Any:
            return torch.tensor(np.concatenate(arrays, axis=-1)).to(device, getattr(torch, dtype))

        decoder, self.table = params["decoder"], put(params["shared"]["embedding"])
        self.norm, self.layers = put(decoder["norm"]["scale"]), []
        for i in range(config.num_decoder_layers):
            layer = decoder[f"layers_{i}"]
            own, cross, feed = (layer[name] for name in ("self_attention", "cross_attention", "feed_forward"))
            encoded, whose = put(self.memory), [put(cross[name]["kernel"]) for name in ("key", "value")]
            empty = torch.zeros(2, config.num_heads, slots, config.d_kv, device=device, dtype=self.table.dtype)
            self.layers.append(
                {
                    "norms": [put(each["norm"]["scale"]) for each in (own, cross, feed)],
                    "in": put(*(own[name]["kernel"] for name in ("query", "key", "value"))),
                    "out": put(own["output"]["kernel"]),
                    "query": put(cross["query"]["kernel"]),
                    "cross": put(cross["output"]["kernel"]),
                    "wi": put(feed["wi"]["kernel"]),
                    "wo": put(feed["wo"]["kernel"]),
                    "memory": [self.heads(encoded @ kernel) for kernel in whose],
                    "cache": empty,
                }
            )
        buckets, longest = config.relative_attention_num_buckets, config.relative_attention_max_distance
        back, exact = np.arange(slots + 1), buckets // 2
        far = exact + (np.log(np.maximum(back, 1) / exact) / np.log(longest / exact) * (buckets - exact)).astype(int)
        bucket = np.where(back < exact, back, np.minimum(far, buckets - 1))
        bias = np.asarray(decoder["relative_bias"]["embedding"])[bucket].T  # [H, slots + 1], by distance
        self.bias = torch.tensor(bias).to(device, self.table.dtype)
        self.places = torch.arange(slots, device=device)
        self.start = torch.zeros((), dtype=torch.long, device=device)  # steps made
        self.tokens = torch.zeros(queries, dtype=torch.long, device=device)
        self.logits: Any = None

    def heads(self, x: Any) -> Any:
        """[H, N, K] of [N, H K]."""
        return x.view(len(x), self.config.num_heads, self.config.d_kv).transpose(0, 1)

    def normed(self, x: Any, scale: Any) -> Any:
        """By the root of the mean square."""
        return self.torch.nn.functional.rms_norm(x, x.shape[-1:], scale, self.config.layer_norm_epsilon)

    def attend(self, queries: Any, keys: Any, values: Any, bias: Any, output: Any) -> Any:
        """[N, D]."""
        found = self.torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=bias, scale=1.0
        )
        return found[0].transpose(0, 1).reshape(queries.shape[1], -1) @ output

    def begin(self) -> None:
        """Back to an empty cache."""
        self.start.zero_()
        self.tokens.zero_()

    def __call__(self) -> None:
        """One step: the queries are slots of one time, and see those of earlier times and each other's rows above."""
        torch, count = self.torch, self.queries
        rows = torch.arange(count, device=self.device)
        own = self.start * count + rows
        time_, row = self.places // count, self.places % count
        seen = (time_ <= self.start) & (row <= rows[:, None])
        back = (rows[:, None] + self.start - row - time_).clamp(0, len(self.places))
        bias = torch.where(seen, self.bias[:, back], float("-inf"))[None]
        x = self.table[self.tokens]
        for layer in self.layers:
            first, second, third = layer["norms"]
            query, key, value = map(self.heads, (self.normed(x, first) @ layer["in"]).chunk(3, dim=-1))
            keys, values = layer["cache"]
            keys.index_copy_(1, own, key)
            values.index_copy_(1, own, value)
            x = x + self.attend(query, keys, values, bias, layer["out"])
            query = self.heads(self.normed(x, second) @ layer["query"])
            keys, values = layer["memory"]
            x = x + self.attend(query, keys, values, None, layer["cross"])
            x = x + torch.relu(self.normed(x, third) @ layer["wi"]) @ layer["wo"]
        x = self.normed(x, self.norm) * self.config.d_model**-0.5
        self.logits = x @ self.table.T
        self.tokens.copy_(self.logits.argmax(-1))
        self.start.add_(1)

    def captured(self) -> Callable[[], None]:
        """A call that makes a step: the graph's, where there is a GPU."""
        torch = self.torch
        with torch.no_grad():
            if self.device != "cuda":
                return torch.no_grad()(self.__call__)
            aside = torch.cuda.Stream()
            with torch.cuda.stream(aside):  # as capturing asks for
                for _ in range(3):
                    self()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self()
        return graph.replay

    def wait(self) -> None:
        """Until the device has done all."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()
