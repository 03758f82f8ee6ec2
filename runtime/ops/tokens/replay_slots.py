"""The replay slots of captured decodes and prompts, as kernels and the host agree on them. Free of torch."""

REPLAY_SLOTS = 4  # steps whose inputs and tokens the host's memory holds: two are in flight, and one is being written
REQUEST_FIELDS = 4  # row, tokens with the new one, slot of the new one; padded, so that one read brings a request
