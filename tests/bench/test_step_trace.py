from mllm_compile.bench.chrome_trace import TracedKernel
from mllm_compile.bench.step_trace import typical_step


def step(*kernels: tuple[str, float]) -> list[TracedKernel]:
    return [TracedKernel(name, 10.0 * index, us, 0, True) for index, (name, us) in enumerate(kernels)]


def test_the_typical_step_is_the_commonest_sequence_with_median_times():
    steps = [
        step(("page", 50), ("gemm", 9), ("norm", 1)),
        step(("gemm", 4), ("norm", 2)),
        step(("gemm", 6), ("norm", 1)),
        step(("gemm", 90), ("norm", 3)),
    ]
    assert [(kernel.name, kernel.us) for kernel in typical_step(steps)] == [("gemm", 6), ("norm", 2)]
