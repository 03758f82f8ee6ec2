"""The parts of a step and the time that each takes."""
