"""Scripts that measure what is around steps: HTTP, starts, and the reading of weights."""
