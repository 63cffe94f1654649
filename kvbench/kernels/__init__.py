"""The hot operations: functions of tensors that do not depend on caches, methods or models.

A module without a leading underscore has an operation in plain torch, which is the reference; the
Triton kernel that replaces it on CUDA is in the module of its name with `_triton_` before it. (The
kernels of `decode` replace what a row's caches do, `kvbench.engine.cache`; their reference is beside
their tests.)
`_choice` decides between the two, by the argument `implementation`; a ValueError says why one that was
asked for cannot run.
"""
