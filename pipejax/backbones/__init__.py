"""Backbones other than T5 and mT5: UMT5, T5Gemma and T5Gemma 2. The core does not depend on them."""
