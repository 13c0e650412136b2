"""T5: an encoder-decoder with relative positions."""
