"""Operators in plain torch. Each row's arithmetic is independent of the rows beside it."""
