"""What `kvant bench` runs; each module is also `python -m kvant.bench.NAME`."""
