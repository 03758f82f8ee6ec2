"""The stored program and how it runs."""
