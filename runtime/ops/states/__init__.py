"""The ops of layers with a state, as a trace has them and as a program does."""
