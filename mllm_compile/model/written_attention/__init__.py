"""Attention that a model writes out itself, softmax(q·kᵀ)·v, found in its trace and made the op that all others are.

find.py finds it and puts the op in its place. score_rule.py recognises the changes to the scores. masks.py handles
models that do not run without a mask.
"""
