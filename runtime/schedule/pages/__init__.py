"""Pages of the KV cache: whose tokens each holds, and which prefixes are cached. Free of torch."""
