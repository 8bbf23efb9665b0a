"""The benches for a CUDA card: whether everything is right there, and how quick it is."""
