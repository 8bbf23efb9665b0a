"""Replay of traces: what is sent when, and what came of it."""
