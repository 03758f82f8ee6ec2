"""What happens to tokens around a step: they are chosen or drawn, and captured decodes go on from them."""
