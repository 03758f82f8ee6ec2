"""How all that is measured is timed: clocks, repeats and turns, CUDA graphs, the GPU's own state, and JSON lines.

Benchmarks of engines (measure/, limits/), the scripts of benchmarks/ and `make bench` take their times by these.
"""
