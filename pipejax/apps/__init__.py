"""Programs on top of the core: bulk decoding, export, a server, pictures, probes, teaching, data sets and schemas."""
