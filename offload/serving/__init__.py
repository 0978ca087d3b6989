"""Serve a checkpoint over HTTP with Ray Serve, with the very preprocessing of its validation data.

``app(...)`` makes the application of a Predictor; ``build`` makes it for ``serve run`` and ``serve build`` from a script's path. Both need
``pip install 'offload[serve]'``.
"""

from __future__ import annotations

from offload.serving.app import app, build

__all__ = ["app", "build"]
