"""Measures the same work for this engine and others, the machine's limits, and where the time of a step goes.

measure/ has the work and the fresh process that one engine is measured in, adapters/ run the work on an engine, limits/
says what the hardware would allow, trace/ where a step's time goes, show/ makes tables and plots of it. Nothing of the
engine imports this package.
"""
