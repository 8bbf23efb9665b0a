"""The native CPU kernels: C++ sources, how they are compiled, and the calls into them."""
