"""What the runtime reads of disks: regular files, JSON as typed data, and free space."""
