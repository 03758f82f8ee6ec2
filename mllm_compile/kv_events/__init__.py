"""KV events: what the prefix cache holds, told to routers over ZMQ in vLLM's format."""
