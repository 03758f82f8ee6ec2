"""The figures of README.md and the pages on performance: measured by `python -m benchmarks.figures`, put into the
pages by `python -m benchmarks.figures.pages`."""
