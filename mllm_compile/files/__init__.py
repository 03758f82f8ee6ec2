"""Safe reading and writing of files. Knows no model."""
