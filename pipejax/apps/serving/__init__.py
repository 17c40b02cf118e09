"""Serves a checkpoint over HTTP with OpenAI's API, on top of an engine that batches the requests."""
