"""From a checkpoint to rows: the generator, its programs on devices, the decoder's step, records and pictures."""
