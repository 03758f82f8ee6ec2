"""The cached runtime on disk: its key, its files, their use and replacement."""
