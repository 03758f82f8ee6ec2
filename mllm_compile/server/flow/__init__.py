"""Running requests of the front: their tokens become text, and text goes out."""
