"""Load for a server, and what its clients saw."""
