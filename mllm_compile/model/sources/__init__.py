"""Encoder-decoders: the source that an encoder reads, and the decoder that attends to it."""
