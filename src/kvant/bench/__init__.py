"""Benchmarks of `kvant bench`; each module also runs as `python -m kvant.bench.NAME`."""
