"""Steps on a CPU: native kernels whose sums have one order, and the plan that they run.

`native` holds their C sources and `kernels` their boundary; nothing here has sessions or schedules.
"""
