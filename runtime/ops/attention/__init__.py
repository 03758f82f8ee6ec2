"""What pieces and layers attend with: the op between pieces, and the Triton kernels of each kind of attention."""
