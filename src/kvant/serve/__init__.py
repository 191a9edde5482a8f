"""Serve a model with many replicas: `routing` chooses one per request, `ray` runs them."""
