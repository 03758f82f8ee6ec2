"""New weights into a model that serves: their places by name, staged whole, swapped in between two steps."""
