"""Memory behind the KV cache, as it is: slots of the host's memory, files, and copies beside the steps."""
