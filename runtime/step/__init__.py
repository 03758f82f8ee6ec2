"""Runs one engine step: a ScheduledBatch becomes tokens."""
