"""Prefill apart from decode: an engine fetches the pages of prompts that another one has computed."""
