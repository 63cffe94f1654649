"""``python -m kvbench``."""

import logging
import os
import sys

from kvbench.cli.main import main

if __name__ == "__main__":
    # Of torchrun's processes the first tells what all do; other launchers set a RANK as well.
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        logging.disable()
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    main()
