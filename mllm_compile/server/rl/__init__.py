"""Rollouts over HTTP: the development paths of vLLM, SGLang and prime-rl (docs/rollouts.md)."""
