"""The Triton side of FlowPrefill: requests in, responses out. Owns no policy and no torch."""
