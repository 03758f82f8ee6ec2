"""Steps in two parts that run beside each other, so that sums over ranks of one are hidden behind the other's work."""
