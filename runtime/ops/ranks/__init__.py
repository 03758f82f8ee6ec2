"""Ops that pieces of several ranks call, and the family of the kernel of small sums (collectives/push.cu)."""
