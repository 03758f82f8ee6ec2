"""A model's folder: found or fetched, and its files read as plain data and checked."""
