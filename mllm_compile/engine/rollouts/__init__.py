"""A trainer's and an operator's calls between steps: weights, pauses, sleep. The gate of steps is above."""
