"""What the hardware allows, and how near a step comes to it."""
