"""All that runs per token. Imports neither transformers, Dynamo nor Inductor, and nothing of the compiler."""
