"""Servers of many replicas: `routing` says which of them a request goes to, `ray` runs them."""
