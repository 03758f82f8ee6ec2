"""The HTTP server: `front` answers clients, and talks by `wire` to the process of `backend`, which has the engine."""
