"""What the machine is: devices, dtypes, memory, threads, and the modes of PyTorch."""
