"""Stand-in for torchvision where it is not installed: names that vLLM's vision code imports.

A text model calls none of them.
"""

__version__ = "0.28.0"
