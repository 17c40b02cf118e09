"""OpenVINO as a peer, by optimum-intel: weights in float32, or in int8 with the arithmetic that OpenVINO chooses."""

import sys
from pathlib import Path

from lab.benchmarks.peers import worker
from lab.benchmarks.peers.hugging_face import Generating


def load(name: str, directory: Path, *, threads: int) -> Generating:
    """Exports the model if that has not been done yet, and compiles it."""
    # If torchvision is built for another kind of device than PyTorch, importing transformers fails. T5 needs no images.
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    import torch
    from optimum.intel import OVModelForSeq2SeqLM

    torch.set_num_threads(threads)
    target = worker.converted(
        directory.parent / name,
        lambda part: OVModelForSeq2SeqLM.from_pretrained(
            directory, export=True, load_in_8bit=name == "openvino-int8", compile=False
        ).save_pretrained(part),
    )
    options = {"INFERENCE_NUM_THREADS": str(threads), "PERFORMANCE_HINT": "LATENCY"}
    if name == "openvino-fp32":  # on a processor with AMX it would compute in bfloat16 by default
        options["INFERENCE_PRECISION_HINT"] = "f32"
    return Generating(OVModelForSeq2SeqLM.from_pretrained(target, ov_config=options))


if __name__ == "__main__":
    worker.serve(
        lambda flags: load(flags.name, flags.directory, threads=flags.threads), "openvino", "optimum-intel", "nncf"
    )
