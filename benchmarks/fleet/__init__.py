"""A simulator of several engines behind the router of `--replicas`: no model runs."""
