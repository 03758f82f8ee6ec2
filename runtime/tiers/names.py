"""Names that processes share. Free of torch and numpy."""

KEPT_FILE = "mllm-kv-tier"  # a file in memory for slots that outlive an engine
KEPT_VARIABLE = "MLLM_KV_TIER"  # of the environment: the file's descriptor
RANKS_BEGIN = b'{"tier": '  # of messages between ranks
