"""The operators in plain PyTorch: the path of every device without kernels of its own, and the oracle of the tests. No autograd.

Nothing here is tuned, accumulates in less than float32 (float64 for float64), rounds more than once, depends on the order in which threads
finish, or reads a row that the plan does not name.
"""
