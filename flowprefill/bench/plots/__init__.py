"""Figures: pure functions from data to a matplotlib Figure, and timelines for Perfetto."""
