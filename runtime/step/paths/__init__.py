"""The ways from a batch to its tokens, and the choice of one."""
