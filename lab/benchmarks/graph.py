"""A decoding step of T5, written by hand in PyTorch and captured in a CUDA graph: the peer to beat on a GPU.

The step decodes one example with T5 v1.0. It embeds its queries, writes their keys and values into the cache, attends
with PyTorch's fused kernel, and takes the most likely tokens, which are the queries of the next step. The host replays
the steps of an answer without waiting, so they are timed together. The step does not encode, end an answer or choose
rows. Without a GPU the step is called without a CUDA graph.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pipejax.config import T5Config


def measured(step: "Step", steps: int, rounds: int = 5) -> float:
    """The seconds of a step in the fastest of `rounds` answers."""
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
        """Puts the weights on the device. `memory`: random encoded tokens [source, D]."""
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
        bias = np.asarray(decoder["relative_bias"]["embedding"])[bucket].T  # [H, slots + 1]: the bias of each distance
        self.bias = torch.tensor(bias).to(device, self.table.dtype)
        self.places = torch.arange(slots, device=device)
        self.start = torch.zeros((), dtype=torch.long, device=device)  # the number of steps so far
        self.tokens = torch.zeros(queries, dtype=torch.long, device=device)
        self.logits: Any = None

    def heads(self, x: Any) -> Any:
        """Splits [N, H K] into heads [H, N, K]."""
        return x.view(len(x), self.config.num_heads, self.config.d_kv).transpose(0, 1)

    def normed(self, x: Any, scale: Any) -> Any:
        """Divides by the root of the mean square, and multiplies by `scale`."""
        return self.torch.nn.functional.rms_norm(x, x.shape[-1:], scale, self.config.layer_norm_epsilon)

    def attend(self, queries: Any, keys: Any, values: Any, bias: Any, output: Any) -> Any:
        """[N, D]."""
        found = self.torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=bias, scale=1.0
        )
        return found[0].transpose(0, 1).reshape(queries.shape[1], -1) @ output

    def begin(self) -> None:
        """Empties the cache."""
        self.start.zero_()
        self.tokens.zero_()

    def __call__(self) -> None:
        """Makes a step. Its queries are slots of one time; they see earlier times, and the rows above at this time."""
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
        """A function that makes a step; on a GPU it replays the CUDA graph."""
        torch = self.torch
        with torch.no_grad():
            if self.device != "cuda":
                return torch.no_grad()(self.__call__)
            aside = torch.cuda.Stream()
            with torch.cuda.stream(aside):  # capturing requires calls on a side stream
                for _ in range(3):
                    self()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self()
        return graph.replay

    def wait(self) -> None:
        """Waits until the device has finished."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()
