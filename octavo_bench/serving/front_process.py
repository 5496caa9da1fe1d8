"""The process that ``octavo bench front`` measures; its arguments are ``PORT STEP_MS MODEL [JOURNAL]``."""

from __future__ import annotations

import sys

from octavo.config import ServeConfig
from octavo_server.front import serving


def main() -> int:
    """Serve ``MODEL``'s tokenizer in front of a paced engine until SIGTERM; ``JOURNAL``: a folder for one."""
    port, step_ms, model, *journal = sys.argv[1:]
    settings = {"model": model, "port": int(port), "log_level": "error", "served_model_name": "paced"}
    config = ServeConfig.from_flat(settings | ({"journal": journal[0]} if journal else {}))
    argv = [sys.executable, "-m", "octavo_bench.serving.paced_engine", step_ms]
    return serving.run(config, engine_argv=argv)


if __name__ == "__main__":
    sys.exit(main())
