"""Texts to embeddings, scores and labels: what pooling models compute beside their packed rows."""
