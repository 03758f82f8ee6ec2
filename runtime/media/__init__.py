"""Images and videos of a prompt, as the runtime has them: what its tower takes, positions, keys and features."""
