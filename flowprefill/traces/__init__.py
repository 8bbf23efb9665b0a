"""Request traces: what one request of a trace says, and the files that it is read from."""
