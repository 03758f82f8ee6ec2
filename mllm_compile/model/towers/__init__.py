"""Towers of vision-language models: one adapter a protocol, chosen by what a model has."""
