"""ONNX Runtime as a peer, by optimum-onnx: float32, or dynamic int8 for all products with a scale for each channel."""

from pathlib import Path

from lab.benchmarks.peers import worker
from lab.benchmarks.peers.hugging_face import Generating


def load(name: str, directory: Path, *, threads: int) -> Generating:
    """Exports the model if that has not been done yet, and opens its sessions."""
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForSeq2SeqLM, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    torch.set_num_threads(threads)

    def quantize(part: Path) -> None:
        config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
        for file in sorted(target.glob("*.onnx")):
            ORTQuantizer.from_pretrained(target, file_name=file.name).quantize(
                save_dir=part, quantization_config=config, file_suffix=""
            )

    target = worker.converted(
        directory.parent / "onnx-fp32",
        lambda part: ORTModelForSeq2SeqLM.from_pretrained(directory, export=True, use_merged=False).save_pretrained(
            part
        ),
    )
    if name == "onnx-int8":
        target = worker.converted(directory.parent / name, quantize)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return Generating(ORTModelForSeq2SeqLM.from_pretrained(target, session_options=options, use_merged=False))


if __name__ == "__main__":
    worker.serve(lambda flags: load(flags.name, flags.directory, threads=flags.threads), "onnxruntime", "optimum-onnx")
