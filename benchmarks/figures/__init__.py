"""The figures of README.md and docs/performance.md: measured by `python -m benchmarks.figures`, put into the pages by
`python -m benchmarks.figures.pages`."""
