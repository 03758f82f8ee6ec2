"""The compiler's knowledge of models: the hook into Transformers' attention, and the embedded model.

Adapters for architectures with facts that a trace lacks would be here, and only here: no other folder branches on a
model type or a class name. tiny/ is the embedded model (its README.md is the model card); it is data, no code.
"""
