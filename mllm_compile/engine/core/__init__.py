"""The engine's thread, and everything that it alone touches while it runs."""
