"""The version of the package; CHANGELOG.md has the same on top."""

__version__ = "0.1.0"
