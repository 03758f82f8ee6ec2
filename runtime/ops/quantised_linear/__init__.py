"""The linear of a quantised weight."""
