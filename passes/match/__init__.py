"""Questions about FX nodes, which passes share."""
