"""Graph in, graph out. Passes know op schemas (runtime.ops), not the engine; pipeline.py is the ordered list."""
