"""The user's config, and the values that it becomes."""
