"""Reads GGUF files as model folders: config, tokenizer and tensors' names as Transformers has them."""
