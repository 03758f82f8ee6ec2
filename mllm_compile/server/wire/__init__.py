"""The messages between the front and the engine's process."""
