"""Ops that add to a linear's output what tokens' adapters change."""
