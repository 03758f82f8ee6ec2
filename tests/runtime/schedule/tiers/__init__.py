"""Tiers of memory as the scheduler sees them."""
