"""Other engines, each in its own interpreter, beside ours: how they are named, run and asked."""
