"""Replacements inside torch and Inductor, one file each."""
