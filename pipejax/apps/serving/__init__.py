"""A checkpoint over HTTP as OpenAI's clients ask for it, above the engine that batches their requests."""
