"""The command line of lm-eval with kvant's model: `python -m kvant.lm_eval --tasks ...`."""

import logging
import sys
from importlib.util import find_spec

from kvant.errors import CacheError
from kvant.lm_eval import MODEL_NAME

MODEL_FLAGS = ("--model", "-M")
MODEL_FREE_ARGUMENTS = ("ls", "validate", "--help", "-h")  # first ones that run no model


def main() -> None:
    if find_spec("lm_eval") is None or find_spec("accelerate") is None:
        sys.exit("kvant.lm_eval needs lm-eval: pip install 'kvant[lm-eval]'")
    arguments = sys.argv[1:]
    if any(argument.split("=")[0] in MODEL_FLAGS for argument in arguments):
        sys.exit(f"kvant.lm_eval runs lm-eval's model {MODEL_NAME}: drop --model")
    if arguments and arguments[0] not in MODEL_FREE_ARGUMENTS:
        sys.argv += ["--model", MODEL_NAME]
    from lm_eval.__main__ import cli_evaluate

    import kvant.lm_eval.model  # noqa: F401  # registers the model

    try:
        cli_evaluate()
    except (ValueError, CacheError) as error:  # of a spec, a model or a task
        logging.getLogger("kvant").debug("lm-eval failed", exc_info=True)
        sys.exit(f"kvant.lm_eval: {error}")


if __name__ == "__main__":
    main()
