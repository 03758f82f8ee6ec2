"""Steps on their way from the rank that plans them to those that follow: records, and the ring that they are in."""
