"""Everything that does not depend on T5: commands, files, streams, processes, and JAX's settings."""
