"""Memory behind the KV cache, as the scheduler sees it: what is where, what moves, and what goes. Free of torch."""
