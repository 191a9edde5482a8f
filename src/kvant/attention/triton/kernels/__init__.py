"""The kernels in Triton's language; importing them imports Triton."""
