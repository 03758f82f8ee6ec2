"""Engines of models that pool: texts to embeddings, scores and labels."""
