"""The kernels, in Triton's language: Python in syntax alone. Imported only where they are run."""
