"""Training: the training loop, the compiled step, the optimizer, the log and the memory estimate."""
