"""The kernels: Triton on a GPU, the torch reference beside each one on a CPU."""
