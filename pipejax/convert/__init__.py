"""Converts checkpoints from and to Hugging Face; a converted checkpoint is a run directory like any other."""

from pipejax.convert.huggingface import from_hf, read_hf, to_hf, write_hf

__all__ = ["from_hf", "read_hf", "to_hf", "write_hf"]
