"""This process and its terminal: progress, times, bytecode, garbage collection."""
