"""C++ of our own that runs on the CPU: its libraries, and how they are loaded."""
