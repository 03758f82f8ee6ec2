"""Adapters (LoRA): the buffers that a program reads them from."""
