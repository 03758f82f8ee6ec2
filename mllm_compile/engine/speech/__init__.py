"""Speech to text: sounds of any length, by a model whose encoder reads windows of them."""
