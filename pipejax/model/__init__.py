"""The T5 model: it maps tokens, masks and positions to logits, and is independent of grids, data and files."""
