"""What a spec does to a model, found by running it."""
