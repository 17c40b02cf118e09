"""Weights in the formats of torch (`pytorch_model.bin`) and of flax (`flax_model.msgpack`), read without torch."""
