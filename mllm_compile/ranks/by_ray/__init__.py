"""Ranks that are actors of Ray, over one node or several: where they are, what a node lacks, and their start."""
