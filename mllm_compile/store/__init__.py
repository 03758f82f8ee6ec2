"""The cached runtime on disk: its key, its files, who may use and replace them."""
