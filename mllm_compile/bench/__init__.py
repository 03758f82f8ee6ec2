"""Measuring: the same work for this engine and others, what the machine allows, and where the time of a step goes.

workloads.py defines the work, adapters/ run it on an engine, worker.py is the fresh process that one engine is measured
in, harness.py starts it, limits.py says what the hardware would allow, report.py and plot.py show it. roofline.py looks
inside a step. Nothing of the engine imports this package.
"""
