"""Figures, log lines and traces of a server's requests."""
