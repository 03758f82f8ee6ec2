"""The interfaces that clients speak: their fields, answers, streams and errors."""
