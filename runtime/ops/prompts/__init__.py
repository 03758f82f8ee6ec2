"""Attention of prompts over the pages of the KV cache, by a kernel of the program."""
