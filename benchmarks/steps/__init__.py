"""Scripts that measure steps of an engine: decodes, prompts, the host's part of them, and what a choice costs."""
