"""What is replaced inside torch and Inductor, one file each."""
