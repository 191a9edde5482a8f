"""16-bit weights packed for the CPU, and the kernels that multiply with them."""
