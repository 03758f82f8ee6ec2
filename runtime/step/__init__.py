"""One engine step: a ScheduledBatch becomes tokens."""
