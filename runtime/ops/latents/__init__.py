"""Attention over latents (MLA): all query heads share one KV head, whose values are the first columns of its keys."""
