"""What is asked for, and the values that it becomes."""
