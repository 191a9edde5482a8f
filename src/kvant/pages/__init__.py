"""Pages without rows: slots in pools, transitions of page tables, and the tensors of slots."""
