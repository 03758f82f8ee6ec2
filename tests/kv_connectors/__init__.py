"""Stores of others, and the test of them."""
