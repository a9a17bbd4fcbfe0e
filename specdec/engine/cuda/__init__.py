"""The engine on a GPU: paged storage in the model's type, plans copied at once, varlen attention, CUDA graphs.

Every module also runs with device "cpu", in tests only: planner, storage, padding and buffers are the same code,
attention is `Dense`, and a captured graph is a repeated call.
"""
