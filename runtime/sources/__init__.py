"""The sources of encoder-decoders: what an encoder reads, and the pages of what a decoder attends to."""
