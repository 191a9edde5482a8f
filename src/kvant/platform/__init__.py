"""What the machine is: devices, dtypes, memory, threads, modes of PyTorch, and its packages."""
