"""Slots of the host's memory, files, and copies."""
