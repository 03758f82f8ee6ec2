"""The parts of the pass `shard`: cells and their classes, labels of values, and what a cut makes of a call."""
