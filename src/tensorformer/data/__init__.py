"""Text to tokens to batches: the same tokens in the same order for every variant of a comparison."""
