"""Prompts in, answers out: the engine, its thread and what callers get."""
