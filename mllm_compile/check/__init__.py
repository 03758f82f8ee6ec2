"""What was compiled is compared with Transformers and torch before it is published."""
