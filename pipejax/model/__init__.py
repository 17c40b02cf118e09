"""The T5: masks and distances in, logits out. It knows nothing of grids, data or disks."""
