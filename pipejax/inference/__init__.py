"""Inference: the generator, compiled programs, backends, continuous batching, streaming and records."""
