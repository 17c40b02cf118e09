"""The T5: masks and positions in, logits out. It knows nothing of grids, data or disks."""
