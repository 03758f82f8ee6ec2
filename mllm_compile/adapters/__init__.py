"""LoRA adapters as PEFT publishes them: a folder is read, checked against the base model, and refused by name."""
