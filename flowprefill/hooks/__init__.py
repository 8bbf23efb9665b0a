"""Any transformers causal LM as a Program: its forward pass is suspended at hooked modules."""
