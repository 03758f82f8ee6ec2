"""The compiler's knowledge of models: the hook into Transformers' attention, and the embedded model.

Adapters for architectures whose trace cannot know something would live here too, and only here: no other room branches
on a model type or a class name. tiny/ is the embedded model (its README.md is the model card); it is data, no code.
"""
