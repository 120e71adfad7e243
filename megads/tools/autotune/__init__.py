"""Autotuning on a GPU: which implementation of attention and of each operator is the fastest on a run's shapes.

`choice` decides for a run (`megads.train.setup.tuned_kernels`); `attention_trials` and `operator_trials` are what is
measured, by `benchmark`. `graphs` decides about CUDA graphs, after the first steps.
"""

__all__ = ["attention_trials", "benchmark", "choice", "graphs"]
