"""The hardware's limits, and how near a step comes to them."""
