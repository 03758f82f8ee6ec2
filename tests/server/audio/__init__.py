"""Tests of the interface of speech."""
