"""Images and videos of a prompt, on their way in: from what a caller gives to what a model's programs take."""
