"""A checkpoint over HTTP: the completions that OpenAI's clients speak, above the engine that batches them."""
