"""transformers as a peer: its `generate` in PyTorch."""

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.peers import worker
from lab.benchmarks.peers.worker import Answer


class Generating:
    """Any model that has the `encoder` and the `generate` of transformers."""

    def __init__(self, model: Any, device: str = "cpu", **options: Any) -> None:
        """Wraps a model. `options`: passed to `generate`."""
        import torch

        self.torch, self.model, self.device, self.options = torch, model, device, options

    def run(self, source: list[list[int]], lengths: Sequence[int]) -> Answer:
        """See `worker.Model`."""
        with self.torch.inference_mode():
            begun = time.perf_counter()
            ids = self.torch.tensor(source, dtype=self.torch.long, device=self.device)
            mask = self.torch.ones_like(ids)
            encoded = self.model.get_encoder()(input_ids=ids, attention_mask=mask)
            if self.device == "cuda":
                self.torch.cuda.synchronize()
            middle = time.perf_counter()
            found = self.generate(lengths, encoder_outputs=encoded, attention_mask=mask)
            return Answer(middle - begun, time.perf_counter() - middle, found)

    def generate(self, lengths: Sequence[int], **inputs: Any) -> list[list[int]]:
        """Decodes greedy answers of exactly these lengths, eos included."""
        from transformers import LogitsProcessor, LogitsProcessorList

        ends = self.torch.tensor(lengths, device=self.device)

        class Force(LogitsProcessor):  # type: ignore[misc]
            def __call__(self, ids: Any, scores: Any) -> Any:
                scores[:, 1] = float("-inf")
                scores[ids.shape[1] >= ends, 1] = float("inf")
                return scores

        found = self.model.generate(
            **inputs,
            max_new_tokens=max(lengths),
            do_sample=False,
            num_beams=1,
            logits_processor=LogitsProcessorList([Force()]),
            **self.options,
        )
        return [row[1 : 1 + n] for row, n in zip(found.tolist(), lengths, strict=True)]


class HuggingFace(Generating):
    """A model of transformers in PyTorch, which attends with its fused kernel if transformers requests it (SDPA).

    "hf" computes in the given dtype, "hf-bf16" in bfloat16, and "hf-int8" in float32 with PyTorch's dynamic int8 for
    all matrices except the embedding (PyTorch has this for CPUs only). "hf-compiled" is "hf" with a static cache and a
    decoder step that torch.compile has compiled; on a CPU the encoder is compiled, too.
    """

    def __init__(
        self, name: str, directory: Path, *, threads: int, dtype: str = "float32", device: str = "cpu"
    ) -> None:
        """Loads the model."""
        import torch
        from transformers import AutoModelForSeq2SeqLM, CompileConfig

        torch.set_num_threads(threads)
        dtype = {"hf-bf16": "bfloat16", "hf-int8": "float32"}.get(name, dtype)
        model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        super().__init__(model.to(device).eval(), device)
        if name == "hf-int8":
            with warnings.catch_warnings():  # deprecated in favour of a separate library
                warnings.simplefilter("ignore")
                quantize: Any = torch.ao.quantization.quantize_dynamic
                self.model = quantize(self.model, {torch.nn.Linear}, dtype=torch.qint8)
        if name == "hf-compiled":
            self.options = {"cache_implementation": "static"}
            if device == "cpu":  # on a CPU transformers compiles only on request
                compiling = CompileConfig(mode="default")
                compiling._compile_all_devices = True
                self.options["compile_config"] = compiling
                self.model.get_encoder().compile()


if __name__ == "__main__":
    worker.serve(
        lambda flags: HuggingFace(
            flags.name, flags.directory, threads=flags.threads, dtype=flags.dtype, device=flags.device
        ),
        *("torch", "transformers"),
    )
