"""Kernels of a step on a GPU, in Triton, each with a plain function that launches it.

Every function writes to tensors that it is given, allocates nothing and does not wait, so that a CUDA graph can capture
it. A row has the same bits whatever the number of rows and whatever stands in other rows: one binary serves 1 to 16
rows, more rows are more tiles of that binary, and the order of each sum is a function of the weight's shape alone.
Modules here can be imported without Triton; `launch.is_there()` says whether they can be used.
"""
