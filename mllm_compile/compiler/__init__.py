"""A config becomes a runtime; load_or_compile.py is where to start reading."""
