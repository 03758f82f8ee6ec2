"""Who runs in the next step, and on which pages. Free of torch."""
