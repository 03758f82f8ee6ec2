"""All that knows Inductor: no other room imports torch._inductor."""
