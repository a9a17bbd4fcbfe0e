"""Steps on a CPU: native kernels whose sums have one order, the plan that they run, and the path without them.

`native` holds the kernels' C sources and `kernels` their boundary; nothing here has sessions or schedules.
"""
