"""The inputs of captured verify steps, as kernels and the host agree on them. Free of torch."""

MOST_DRAFTED = 15  # tokens of a request's draft; with the one before it they are a power of two
# Of a request, int32: its row, 0 of padding; its tokens in the KV cache, -1 where the device knows; most tokens of its
# draft; how many of these follow, -1 where the device drafts; what positions are beyond indices, of a prompt with
# images; and the draft.
DRAFT_FIELD = 5
VERIFY_FIELDS = DRAFT_FIELD + MOST_DRAFTED
# What the first kernel leaves for the last one, int32: tokens in the KV cache, tokens of the draft, and they.
DRAFTED_FIELDS = 2 + MOST_DRAFTED
# Settings, int32: fewest and most of the newest tokens that are looked up; 1: every draft is as long as it may be.
NUM_SETTINGS = 3
# Results of a request, int64: how many new tokens it has; how many were drafted; and what was chosen behind each token
# of the step, new tokens first, -1 behind the draft's.
RESULT_FIELDS = 2 + MOST_DRAFTED + 1
