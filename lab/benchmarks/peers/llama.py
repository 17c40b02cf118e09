"""llama.cpp as a peer, by xllamacpp's library and llama-cpp-py-sync's declarations: float32, or Q8_0 for matrices.

llama.cpp has no cache for cross-attention: it computes the keys and values of the source again for each token. Examples
are decoded one after the other.
"""

import ctypes
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.benchmarks.peers import worker
from lab.benchmarks.peers.vocabulary import SPECIAL, words_of
from lab.benchmarks.peers.worker import Answer

EOS = 1
PARTS = {"SelfAttention": "attn", "EncDecAttention": "cross_attn"}
FEED = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}


def name_of(parameter: str) -> str:
    """A parameter's name in GGUF: "encoder.block.3.layer.0.SelfAttention.q.weight" is "enc.blk.3.attn_q.weight"."""
    if parameter in ("shared.weight", "lm_head.weight"):
        return {"shared.weight": "token_embd.weight", "lm_head.weight": "output.weight"}[parameter]
    side, *inner = parameter.split(".")
    if inner[0] == "final_layer_norm":
        return f"{side[:3]}.output_norm.weight"
    _, block, _, layer, module, *matrix = inner
    if module == "layer_norm":
        names = ["attn", "cross_attn", "ffn"] if side == "decoder" else ["attn", "ffn"]
        name = f"{names[int(layer)]}_norm"
    elif module == "DenseReluDense":
        name = f"ffn_{FEED[matrix[0]]}"
    else:
        name = f"{PARTS[module]}_{matrix[0].replace('relative_attention_bias', 'rel_b')}"
    return f"{side[:3]}.blk.{block}.{name}.weight"


def parameters(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each parameter in a directory of a Hugging Face model once, with its name."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (`tensors` is no mapping)
                if not name.endswith("embed_tokens.weight"):
                    yield name, tensors.get_tensor(name)


def convert(directory: Path, file: Path, quantized: bool) -> None:
    """Writes a GGUF file, with matrices in Q8_0 if `quantized`."""
    import gguf

    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "t5")
    writer.add_context_length(512)
    writer.add_embedding_length(config["d_model"])
    writer.add_feed_forward_length(config["d_ff"])
    writer.add_block_count(config["num_layers"])
    writer.add_decoder_block_count(config["num_decoder_layers"])
    writer.add_head_count(config["num_heads"])
    writer.add_key_length(config["d_kv"])
    writer.add_value_length(config["d_kv"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_relative_attn_buckets_count(config["relative_attention_num_buckets"])
    writer.add_decoder_start_token_id(config["decoder_start_token_id"])
    size = config["vocab_size"]
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word.encode() for word in words_of(range(size))])
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types([3, 3, 2] + [1] * (size - len(SPECIAL)))  # control, control, unknown, normal
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(2)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, value in parameters(directory):
        if quantized and value.ndim == 2 and "relative_attention_bias" not in name:
            writer.add_tensor(name_of(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name_of(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A model of llama.cpp, greedy."""

    def __init__(self, name: str, directory: Path, *, threads: int) -> None:
        """Converts the model if that has not been done yet, and loads it."""
        import xllamacpp
        from llama_cpp_py_sync import _cffi_bindings as bindings

        file = worker.converted(
            directory.parent / f"{name}.gguf",
            lambda part: convert(directory, part, quantized=name == "llama-int8"),
        )
        self.ffi, self.threads = bindings.get_ffi(), threads
        (library,) = Path(xllamacpp.__file__).parent.glob("*.abi3.so")
        ctypes.PyDLL(str(library))
        self.library: Any = self.ffi.dlopen(str(library))
        self.library.llama_backend_init()
        self.model = self.library.llama_model_load_from_file(
            str(file).encode(), self.library.llama_model_default_params()
        )
        if self.model == self.ffi.NULL:
            raise ValueError(f"{file}: llama.cpp did not load it")
        self.size = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.model))
        self.context, self.holds = None, (0, 0)

    def run(self, source: list[list[int]], lengths: Sequence[int]) -> Answer:
        """See `worker.Model`."""
        self._reserve(len(source[0]), max(lengths))
        found = [self._one(ids, length) for ids, length in zip(source, lengths, strict=True)]
        return Answer(sum(x[0] for x in found), sum(x[1] for x in found), [x[2] for x in found])

    def _reserve(self, source: int, tokens: int) -> None:
        """Creates a context for this many tokens, unless the present context is large enough."""
        if self.context is None or source > self.holds[0] or tokens > self.holds[1]:
            if self.context is not None:
                self.library.llama_free(self.context)
            params = self.library.llama_context_default_params()
            params.n_ctx = max(source, tokens) + 64
            params.n_batch = params.n_ubatch = max(source, 64)
            params.n_threads = params.n_threads_batch = self.threads
            self.context, self.holds = self.library.llama_init_from_model(self.model, params), (source, tokens)

    def _one(self, source: list[int], length: int) -> tuple[float, float, list[int]]:
        library, ffi, tokens = self.library, self.ffi, [0]
        library.llama_memory_clear(library.llama_get_memory(self.context), True)
        ids, last = ffi.new("int32_t[]", source), ffi.new("int32_t[]", tokens)
        begun = time.perf_counter()
        if library.llama_encode(self.context, library.llama_batch_get_one(ids, len(source))):
            raise RuntimeError("llama_encode failed")
        middle = time.perf_counter()
        for _ in range(length):
            last[0] = tokens[-1]
            if library.llama_decode(self.context, library.llama_batch_get_one(last, 1)):
                raise RuntimeError("llama_decode failed")
            buffer = ffi.buffer(library.llama_get_logits_ith(self.context, -1), 4 * self.size)
            logits = np.frombuffer(buffer, np.float32)
            logits[EOS] = -np.inf
            tokens.append(int(logits.argmax()))
        return middle - begun, time.perf_counter() - middle, tokens[1:]


if __name__ == "__main__":
    worker.serve(
        lambda flags: LlamaCpp(flags.name, flags.directory, threads=flags.threads), "xllamacpp", "llama-cpp-py-sync"
    )
