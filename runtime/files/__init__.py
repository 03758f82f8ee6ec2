"""Regular files, JSON as typed data, and free disk space, as the runtime reads them."""
