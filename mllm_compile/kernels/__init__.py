"""Kernels that the compiler writes or builds itself: no graph was traced for them."""
