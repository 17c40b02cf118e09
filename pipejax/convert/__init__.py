"""Converts checkpoints from and to the Hugging Face format, and to smaller dtypes.

A converted checkpoint is a run directory like any other.
"""

from pipejax.convert.huggingface import from_hf, read_hf, to_hf, write_hf
from pipejax.convert.quantized import quantize

__all__ = ["from_hf", "quantize", "read_hf", "to_hf", "write_hf"]
