"""The device: opening it, its memory, and copies to and from it."""
