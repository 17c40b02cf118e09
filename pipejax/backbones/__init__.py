"""Backbones beside T5 and mT5: UMT5 and T5Gemma. The core works without them."""
