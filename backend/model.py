"""What the server's Python stub imports as `model`; all code is in the package that it names.

Kept tiny because the stub appends this directory to its path: a helper module here could be
shadowed by any other of its name.
"""

from flowprefill_backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
