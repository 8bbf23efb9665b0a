"""The same scheduler under a virtual clock: event loop, cost models."""
