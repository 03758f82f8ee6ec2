"""What the CUDA C++ kernels of other rooms have in common: how one is described, its source, loading and launching. The
compiler builds them by NVRTC (mllm_compile/kernels/cuda.py); a runtime holds the binaries."""
