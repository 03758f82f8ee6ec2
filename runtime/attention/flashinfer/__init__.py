"""FlashInfer's kernels: which one a batch gets, their plans and wrappers."""
