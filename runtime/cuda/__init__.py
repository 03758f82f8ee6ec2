"""The parts that the CUDA C++ kernels of other rooms share: how one is described, its source, loading and launching.
The compiler builds them by NVRTC (mllm_compile/kernels/cuda.py); a runtime holds the binaries."""
