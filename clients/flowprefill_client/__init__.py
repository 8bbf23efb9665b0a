"""Typed clients for a FlowPrefill model on tritonserver. Never imports torch."""
