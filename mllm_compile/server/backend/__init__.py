"""The engine's side of the server, in a process of its own."""
