"""Chooses the requests of the next step, and their pages. Free of torch."""
