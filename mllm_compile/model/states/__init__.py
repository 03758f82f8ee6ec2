"""How recurrent layers of Transformers become ops."""
