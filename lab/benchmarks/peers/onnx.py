"""ONNX Runtime by optimum-onnx: float32, or its dynamic int8 for all products, scales by output channel."""

from pathlib import Path

from lab.benchmarks.peers import worker
from lab.benchmarks.peers.hugging_face import Generating


def load(name: str, directory: Path, *, threads: int) -> Generating:
    """Exports the model, once, and opens its sessions."""
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForSeq2SeqLM, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    torch.set_num_threads(threads)
    plain, target = directory.parent / "onnx-fp32", directory.parent / name
    if not plain.is_dir():
        ORTModelForSeq2SeqLM.from_pretrained(directory, export=True, use_merged=False).save_pretrained(plain)
    if not target.is_dir():
        config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
        for file in sorted(plain.glob("*.onnx")):
            ORTQuantizer.from_pretrained(plain, file_name=file.name).quantize(
                save_dir=target, quantization_config=config, file_suffix=""
            )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return Generating(ORTModelForSeq2SeqLM.from_pretrained(target, session_options=options, use_merged=False))


if __name__ == "__main__":
    worker.serve(lambda flags: load(flags.name, flags.directory, threads=flags.threads), "onnxruntime", "optimum-onnx")
