"""Mixtures of experts: the op of a trace (linear.py) and what passes put in its place on a GPU, by Triton.

choose.py makes a router's choices, order.py lists the rows of each expert in blocks, grouped.py multiplies a block of
rows by its expert's weight. shapes.py has the sizes of blocks; it is free of Triton.
"""
