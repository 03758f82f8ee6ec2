"""Formats of quantised weights: a file a format, from the tensors of a checkpoint to the weight's rows."""
