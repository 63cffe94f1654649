"""``python -m kvbench``."""

import logging
import os
import sys

from kvbench.cli.main import main

if __name__ == "__main__":
    if os.environ.get("RANK", "0") != "0":  # of torchrun's processes the first tells what all do
        logging.disable()
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    main()
