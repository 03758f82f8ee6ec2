"""Parts of scripts that measure memory behind the KV cache."""
