from types import SimpleNamespace

from mllm_compile.check.each_once import each_once


def test_each_of_the_forms_comes_with_the_first_layer_that_has_it():
    layers = [SimpleNamespace(name=name) for name in "abcde"]
    forms = {"b": ("few", "many"), "c": ("one",), "d": ("few", "many"), "e": ("one",)}
    found = [(layer.name, of_layer) for layer, of_layer in each_once(layers, forms)]
    assert found == [("b", ("few", "many")), ("c", ("one",))]
