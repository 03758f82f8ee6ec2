"""A server of several models: one front, an engine for each, one owner of each device's memory."""
