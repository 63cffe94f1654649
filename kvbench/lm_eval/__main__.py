"""lm-evaluation-harness's own command line, with the model ``kvbench`` among its models."""

import sys

from kvbench.errors import UserError, complain


def main() -> int:
    """Run lm-evaluation-harness. A refusal of kvbench is printed as one line."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import kvbench.lm_eval  # noqa: F401 - registers the model

        cli_evaluate()
    except UserError as error:
        complain(str(error))
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
