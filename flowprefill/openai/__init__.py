"""The OpenAI-compatible endpoint: HTTP in front of tritonserver's gRPC, without the engine."""
