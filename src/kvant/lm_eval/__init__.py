"""Run the tasks of EleutherAI's lm-eval with a model that reads its kvant cache."""

MODEL_NAME = "kvant"  # in lm-eval's registry
