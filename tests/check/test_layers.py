from types import SimpleNamespace

from mllm_compile.check.layers import one_layer_per_kernel


def test_each_of_the_kernels_comes_with_the_first_layer_that_has_it():
    layers = [SimpleNamespace(name=name) for name in "abcde"]
    kernels = {"b": ("few", "many"), "c": ("one",), "d": ("few", "many"), "e": ("one",)}
    found = [(layer.name, of_layer) for layer, of_layer in one_layer_per_kernel(layers, kernels)]
    assert found == [("b", ("few", "many")), ("c", ("one",))]
