"""Results as tables and plots."""
