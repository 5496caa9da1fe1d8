"""The real server before the oracle engine: ``python -m tests.deploy.oracle_server FOLDER PORT``."""

from __future__ import annotations

import sys

from octavo.config import ServeConfig
from octavo_server.front import serving
from tests.server.forked_engine import forked

if __name__ == "__main__":
    folder, port = sys.argv[1:]
    config = ServeConfig.from_flat({"model": folder, "port": int(port), "seed": 1, "max_num_queued_reqs": 8})
    sys.exit(serving.run(config, forked("oracle_engine")))
