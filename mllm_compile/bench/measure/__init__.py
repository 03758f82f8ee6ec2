"""The work, the process that it is measured in, and its results."""
