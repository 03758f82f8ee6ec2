"""Weights from a checkpoint's files to the device."""
